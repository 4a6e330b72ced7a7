"""An OPT trains with its optimizer in tiers; transformers and FlexGen then answer from it.

The nodes are those of a simulated CXL server: pages are placed on simulated nodes, and the answers
are real. On a machine with CXL memory use ``Session.linux()`` in its place. With DeepSpeed the same
training is two lines, see examples/train_gpt_zero_offload.py; vLLM serves the folder with its KV
cache in tiers by the flags that docs/vllm.md shows.

    python examples/train_and_serve.py [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from gpt_text import make_tokenizer
from zen import ANSWER_TOKENS, BEGINNINGS, expected, first_line, train_zen

import cxl_offload
from cxl_offload import Session, load_machine, use
from cxl_offload.integrations.flexgen import FlexGenRun, run
from cxl_offload.integrations.transformers import load, offload


def adam_in_tiers(parameters: list[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Adam on the CPU, its two moments on the CXL node."""
    return cxl_offload.CPUAdam(parameters, lr=lr, weight_decay=0.01, policy="cxl")


def served_by_transformers(folder: Path) -> list[str]:
    """Unmodified ``generate()``: weights read straight into CXL memory, KV cache in both tiers."""
    tokenizer = make_tokenizer()
    model = load(str(folder), {"weights": "cxl"})
    inputs = tokenizer(list(BEGINNINGS), padding=True, return_tensors="pt")
    with offload(model, {"kv": "weighted:ldram=3,cxl=1@4KiB"}) as done:
        made = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=ANSWER_TOKENS,
            do_sample=False,
        )
    print(f"transformers: {done.calls}")
    answers: list[str] = tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :])
    return answers


def served_by_flexgen(folder: Path, session: Session) -> list[str]:
    """FlexGen with all its host memory in tiers."""
    report = run(
        FlexGenRun(
            model=str(folder),
            prompts=list(BEGINNINGS),
            gen_len=ANSWER_TOKENS,
            gpu_batch_size=len(BEGINNINGS),
            percent=(0, 100, 0, 100, 0, 100),
            cpu_cache_compute=True,
            place={"weights": "bind:cxl", "kv": "interleave:ldram,cxl@4KiB"},
        ),
        session=session,
    )
    for row in report.placement:
        print(f"FlexGen: {row.kind} asked for {row.policy}, granted {row.tiers} bytes")
    return list(report.answers)


def main(folder: Path) -> int:
    session = Session.simulated(load_machine("epyc9354-cxl-a"))
    with use(session):
        loss = train_zen(folder, optimizer=adam_in_tiers)
        states = session.stats().tiers["cxl"].peak_bytes
        print(f"trained to a loss of {loss:.3f}; the optimizer's states held {states} bytes of CXL")
        answers = {
            "transformers": served_by_transformers(folder),
            "FlexGen": served_by_flexgen(folder, session),
        }
    wrong = 0
    for engine, texts in answers.items():
        for beginning, text in zip(BEGINNINGS, texts, strict=True):
            is_right = first_line(text) == expected(beginning)
            wrong += not is_right
            print(f"{engine}: {beginning} ->{first_line(text)}{'' if is_right else '   (WRONG)'}")
    return min(wrong, 1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(main(Path(sys.argv[1])))
    with tempfile.TemporaryDirectory(prefix="cxl-offload-zen-") as scratch:
        sys.exit(main(Path(scratch, "zen")))
