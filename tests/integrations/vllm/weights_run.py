"""One run of vLLM on the CPU, in a process of its own: ``weights_run.py FOLDER OPTIONS``.

Prints one line of JSON: the tokens, those after a damage to the weights that were placed, and the
report. FOLDER gets a random Llama whose tokens depend on its weights.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def make_model(folder: Path) -> None:
    """Saved, not dummy, weights, spread so that greedy tokens depend on them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.mul_(3.0)
    model.to(torch.bfloat16).save_pretrained(folder)


def arguments(folder: Path, options: dict[str, Any]) -> Any:
    """``{"flags": [...]}`` is read by vLLM's own parser, anything else is arguments of LLM."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    settings: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "block_size": 32,
    }
    flags = options.get("flags")
    if flags is None:
        small = {"max_model_len": 256, "dtype": "bfloat16", "max_num_seqs": 2, "seed": 0}
        return EngineArgs(model=str(folder), **settings, **small, **options)
    parser = make_arg_parser(FlexibleArgumentParser())
    made = EngineArgs.from_cli_args(parser.parse_args(["--model", str(folder), *flags]))
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    if not (folder / "config.json").exists():
        make_model(folder)
    count = options.pop("tokens", 16)
    with contextlib.ExitStack() as stack:
        if "machine" in options:
            stack.enter_context(on_machine(options.pop("machine")))
        run(folder, options, count)


@contextlib.contextmanager
def on_machine(name: str) -> Iterator[None]:
    """On the simulated nodes of a machine file, which a machine of one node needs for a second."""
    from cxl_offload import Session, load_machine, use
    from cxl_offload.integrations.vllm import weight_patch

    found = load_machine(name)
    weight_patch.discover = lambda: found
    with use(Session.simulated(found)):
        yield


def emptied(llm: Any) -> list[str]:
    """The weights that vLLM's kernels keep as packed copies of their own.

    Which ones depends on the processor: oneDNN's, all matrices; none without AVX-512.
    """
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    return [name for name, weight in model.named_parameters() if weight.numel() == 0]


def run(folder: Path, options: dict[str, Any], count: int) -> None:
    from vllm import LLM, SamplingParams
    from vllm.model_executor.offloader.base import get_offloader

    llm = LLM.from_engine_args(arguments(folder, options))
    sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
    prompt: Any = {"prompt_token_ids": [(7 * at) % 500 + 3 for at in range(40)]}

    def tokens() -> list[int]:
        return list(llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids)

    offloader = get_offloader()
    made: dict[str, Any] = {
        "tokens": tokens(),
        "offloader": type(offloader).__name__,
        "emptied": emptied(llm),
    }
    report = getattr(offloader, "report", None)
    if report is not None:
        made["report"] = {
            name: getattr(report, name)
            for name in ("asked_bytes", "held_bytes", "kinds", "nodes", "repacked_bytes")
        }
        for _, weight in offloader.placed():
            weight.copy_(weight.flip(0))
        llm.reset_prefix_cache()
        made["damaged"] = tokens()
    sys.stdout.write("RESULT " + json.dumps(made) + "\n")


if __name__ == "__main__":
    main()
