"""An OPT trains with its optimizer in tiers; transformers, FlexGen and vLLM then answer from it.

The nodes are those of a simulated CXL server: pages are placed on simulated nodes, and the answers
are real. On a machine with CXL memory use ``Session.linux()`` in its place. vLLM, in a process of
its own, keeps its KV cache in two tiers on node 0 of this machine; the second takes what the first
drops. FlexGen and vLLM are left out where they are not installed. With DeepSpeed the same training
is two lines, see examples/train_gpt_zero_offload.py.

    python examples/train_and_serve.py [FOLDER]
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

import needs_transformers  # noqa: F401
import torch
from gpt_text import make_tokenizer
from kv_survives import ENGINE, ON_THE_CPU, answer_of, child, say
from zen import ANSWER_TOKENS, BEGINNINGS, expected, first_line, train_zen

import cxl_offload
from cxl_offload import Session, load_machine, use
from cxl_offload.integrations.transformers import load, offload
from cxl_offload.units import KIB


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
    from cxl_offload.integrations.flexgen import FlexGenRun, run

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


def served_by_vllm(folder: Path) -> list[str]:
    """The real vLLM, in a process of its own that is killed when it has answered."""
    with child("vllm", str(folder), script=__file__, **ON_THE_CPU) as process:
        answers, found = answer_of(process)
    print(f"vLLM: asked again, {found} tokens came out of the tiers")
    return [str(answer) for answer in answers]


def answer_with_vllm(folder: str) -> None:
    """Of the child: asks for the answers, then for what follows them, from the tiers."""
    from vllm import LLM, SamplingParams

    tiers = {
        "spec_name": "cxl",
        "cpu_bytes_to_use": 512 * KIB,
        "policy": "bind:0",
        "cold": {"bytes": 4096 * KIB, "policy": "bind:0"},
    }
    engine = LLM(
        folder,
        kv_transfer_config={
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": tiers,
        },
        **ENGINE,
    )
    greedy = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0)
    made = engine.generate(list(BEGINNINGS), greedy, use_tqdm=False)
    answers = [each.outputs[0].text for each in made]
    longer = [beginning + answer for beginning, answer in zip(BEGINNINGS, answers, strict=True)]
    for _ in range(2):  # a store may still be under way when its request has ended
        engine.reset_prefix_cache()  # what vLLM holds itself; the tiers keep theirs
        again = engine.generate(longer, SamplingParams(max_tokens=1), use_tqdm=False)
    say([answers, sum(each.num_cached_tokens or 0 for each in again)])


def is_installed(package: str) -> bool:
    """Whether it is; says so where it is not."""
    there = importlib.util.find_spec(package) is not None
    if not there:
        print(f"{package} is not installed: left out")
    return there


def main(folder: Path) -> int:
    session = Session.simulated(load_machine("epyc9354-cxl-a"))
    with use(session):
        loss = train_zen(folder, optimizer=adam_in_tiers)
        states = session.stats().tiers["cxl"].peak_bytes
        print(f"trained to a loss of {loss:.3f}; the optimizer's states held {states} bytes of CXL")
        answers = {"transformers": served_by_transformers(folder)}
        if is_installed("flexgen"):
            answers["FlexGen"] = served_by_flexgen(folder, session)
    if is_installed("vllm"):
        answers["vLLM"] = served_by_vllm(folder)
    wrong = 0
    for engine, texts in answers.items():
        for beginning, text in zip(BEGINNINGS, texts, strict=True):
            is_right = first_line(text) == expected(beginning)
            wrong += not is_right
            print(f"{engine}: {beginning} ->{first_line(text)}{'' if is_right else '   (WRONG)'}")
    return min(wrong, 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["vllm"] and len(sys.argv) == 3:
        answer_with_vllm(sys.argv[2])
        sys.exit()
    if len(sys.argv) > 1:
        sys.exit(main(Path(sys.argv[1])))
    with tempfile.TemporaryDirectory(prefix="cxl-offload-zen-") as scratch:
        sys.exit(main(Path(scratch, "zen")))
