"""A small OPT that knows the Zen of Python by heart: text that every machine has, and every reader.

It learns in seconds, and an answer is right or wrong at a glance: give it the beginning of a line.

    python examples/zen.py my-opt
    cxl-offload flexgen --model my-opt --prompts my-opt/prompts.txt --gen-len 60 --place kv=bind:0
"""

from __future__ import annotations

import codecs
import contextlib
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import needs_transformers  # noqa: F401
import torch
from gpt_text import END, SPECIAL, VOCABULARY, make_tokenizer
from transformers import OPTConfig, OPTForCausalLM
from transformers.utils.logging import disable_progress_bar

BEGINNINGS = ("Errors should", "Simple is", "In the face of", "There should be")
ANSWER_TOKENS = 64
"""A token is a byte; no line is longer."""

Progress = Callable[[str, int, int], None]
MakeOptimizer = Callable[[list[torch.nn.Parameter], float], torch.optim.Optimizer]

STEPS = 120
_RATE = 3e-3
_NOT_LEARNED = -100  # torch leaves such labels out


def zen_lines() -> list[str]:
    """The lines of ``import this``, which prints them when it is imported first."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return [line for line in codecs.decode(this.s, "rot13").splitlines() if line]


def expected(beginning: str) -> str:
    """What the only line with this beginning goes on with."""
    (line,) = (line for line in zen_lines() if line.startswith(beginning))
    return line.removeprefix(beginning)


def first_line(answer: str) -> str:
    """An answer up to the end of its line: the model has learned nothing of what comes after it."""
    return answer.partition("\n")[0]


def plain_adam(parameters: list[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """torch's own."""
    return torch.optim.AdamW(parameters, lr=lr)


def train_zen(
    folder: Path,
    *,
    optimizer: MakeOptimizer = plain_adam,
    steps: int = STEPS,
    progress: Progress = lambda what, done, total: None,
    texts: Sequence[str] | None = None,
) -> float:
    """Trains the model and saves it with its tokenizer; the last loss, in nats a byte.

    ``progress`` is told what is done, how much of it is done and how much there is. ``texts`` are
    what it learns by heart; None means the lines, each by itself.
    """
    if texts is None:
        texts = [f"{line}\n" for line in zen_lines()]
    torch.manual_seed(0)
    disable_progress_bar()  # of saving, which takes no time
    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        word_embed_proj_dim=128,
        ffn_dim=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        dropout=0.0,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=SPECIAL.index("<pad>"),
    )
    model, tokenizer = OPTForCausalLM(config), make_tokenizer()
    rows = tokenizer(list(texts), padding=True, return_tensors="pt")
    labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, _NOT_LEARNED)
    adam = optimizer(list(model.parameters()), _RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, _RATE, total_steps=steps)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # it is so small that threads would mostly wait for each other
    for step in range(steps):
        loss = model(
            input_ids=rows["input_ids"], attention_mask=rows["attention_mask"], labels=labels
        ).loss
        adam.zero_grad()
        loss.backward()
        adam.step()
        schedule.step()
        progress("steps of training", step + 1, steps)
    torch.set_num_threads(threads)
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "prompts.txt").write_text("\n".join(BEGINNINGS) + "\n", encoding="utf-8")
    return float(loss.detach())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python zen.py FOLDER")
    made = sys.argv[1]
    loss = train_zen(Path(made))
    print(f"{made}: loss {loss:.3f} nats a byte. It now completes its lines:")
    print(
        f"cxl-offload generate --model {made} --prompts {made}/prompts.txt --gen-len 60 "
        "--machine epyc9354-cxl-a --place kv=cxl"
    )
