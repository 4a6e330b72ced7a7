"""The load of benchmarks/bench_vllm_kv.py is what it says it is."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).resolve().parents[3] / "benchmarks" / "vllm_load.py"


@pytest.fixture(scope="module")
def load() -> Any:
    spec = importlib.util.spec_from_file_location("vllm_load", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["vllm_load"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module.Load(
        conversations=3,
        turns=4,
        shared=20,
        document=30,
        message=5,
        answer=7,
        generate=2,
        clients=2,
    )


def test_every_turn_continues_its_conversation_over_the_shared_prefix(load: Any) -> None:
    rounds = load.rounds(seed=1)
    assert len(rounds) == 4
    for before, after in itertools.pairwise(rounds):
        for earlier, later in zip(before, after, strict=True):
            assert later[: len(earlier)] == earlier
            assert len(later) == len(earlier) + 5 + 7
    assert len({tuple(prompt[:20]) for prompt in rounds[0]}) == 1
    assert len({tuple(prompt[20:50]) for prompt in rounds[0]}) == 3


def test_stated_sizes_are_those_of_the_prompts(load: Any) -> None:
    prompts = [prompt for turn in load.rounds(seed=2) for prompt in turn]
    assert load.prompt_tokens == sum(map(len, prompts))
    assert load.longest_prompt == max(map(len, prompts))
    prefixes = {tuple(prompt[: at + 1]) for prompt in prompts for at in range(len(prompt))}
    assert load.working_set_tokens == len(prefixes)
    seen: set[tuple[int, ...]] = set()
    reused = 0
    for prompt in prompts:
        own = {tuple(prompt[: at + 1]) for at in range(len(prompt))}
        reused += len(own & seen)
        seen |= own
    assert load.reusable_tokens == reused


def test_another_seed_has_other_prompts(load: Any) -> None:
    first = {tuple(prompt[:20]) for prompt in load.rounds(seed=1)[0]}
    assert first.isdisjoint(tuple(prompt[:20]) for prompt in load.rounds(seed=3)[0])
