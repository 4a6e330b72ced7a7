"""The load of benchmarks/bench_vllm_kv.py is what it says it is."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.vllm_load import Load


@pytest.fixture(scope="module")
def load() -> Load:
    return Load(
        conversations=3,
        turns=4,
        shared=20,
        document=30,
        message=5,
        answer=7,
        generate=2,
        clients=2,
    )


def test_every_turn_continues_its_conversation_over_the_shared_prefix(load: Load) -> None:
    rounds = load.rounds(seed=1)
    assert len(rounds) == 4
    for before, after in itertools.pairwise(rounds):
        for earlier, later in zip(before, after, strict=True):
            assert later[: len(earlier)] == earlier
            assert len(later) == len(earlier) + 5 + 7
    assert len({tuple(prompt[:20]) for prompt in rounds[0]}) == 1
    assert len({tuple(prompt[20:50]) for prompt in rounds[0]}) == 3


def test_stated_sizes_are_those_of_the_prompts(load: Load) -> None:
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


def test_another_seed_has_other_prompts(load: Load) -> None:
    first = {tuple(prompt[:20]) for prompt in load.rounds(seed=1)[0]}
    assert first.isdisjoint(tuple(prompt[:20]) for prompt in load.rounds(seed=3)[0])
