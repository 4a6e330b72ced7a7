"""The tokens of the real vLLM are those without offloading, and come from our pool."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.integrations.vllm.conftest import RunEngine, kv_offload
from tests.integrations.vllm.tiny_model import CHUNK

MIB = 1 << 20

POOLS: dict[str, dict[str, Any]] = {
    "near": {"cpu_bytes_to_use": "32MiB"},
    "chunks of 4 blocks, interleaved": {
        "cpu_bytes_to_use": float(32 * MIB),
        "blocks_per_chunk": 4,
        "policy": "interleave:0",
        "eviction_policy": "arc",
        "copy_threads": 1,
    },
}


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [each["tokens"] for each in answers]


def cached(answers: list[dict[str, Any]]) -> list[int]:
    return [each["cached"] for each in answers]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", POOLS)
def test_tokens_are_the_same_when_the_kv_cache_comes_back_from_the_pool(
    name: str, run_engine: RunEngine, plain_tokens: list[list[int]]
) -> None:
    extra = POOLS[name]
    seen = run_engine("reuse", kv_offload(**extra))
    block = 32 * extra.get("blocks_per_chunk", 1)
    whole = 299 // block * block
    assert tokens(seen["first"]) == plain_tokens
    assert cached(seen["first"]) == [0] * 4
    assert seen["forgotten"] == [True] * 3
    assert tokens(seen["again"]) == plain_tokens
    assert cached(seen["again"]) == [whole] * 4
    assert tokens(seen["alone"]) == [plain_tokens[3], plain_tokens[1]]
    assert cached(seen["alone"]) == [whole] * 2
    # The control: the same prompts over a pool whose chunks changed places.
    assert cached(seen["damaged"]) == [whole] * 4
    assert all(
        damaged != right
        for damaged, right in zip(tokens(seen["damaged"]), plain_tokens, strict=True)
    )
    assert seen["pool"]["worker"] == "HostCopyWorker"
    assert seen["pool"]["granted"] == {"0": seen["pool"]["nbytes"]}
    assert not seen["pool"]["named"], "the name of the region goes once all have mapped it"
    chunks = 4 * whole // block
    assert seen["counters"].pop("returning_share hot") > 0.8
    assert seen["counters"] == {
        "stored hot": chunks,
        "loaded hot": 2 * chunks + chunks // 2,
        "evicted hot": 0,
        "damaged hot": 0,
        "refused hot": 0,
        "declined hot": 0,
        "chunk_bytes hot": CHUNK // 32 * block,
        "capacity hot": (32 << 20) // (CHUNK // 32 * block),
    }
    assert "Traceback" not in seen["log"]


@pytest.mark.timeout(300)
def test_tokens_are_the_same_when_chunks_come_back_from_the_cold_tier(
    run_engine: RunEngine, plain_six: list[list[int]]
) -> None:
    # Six prompts of 9 chunks each; the hot tier holds 20 chunks, the cold one all.
    extra = {
        "cpu_bytes_to_use": 20 * CHUNK,
        "policy": "bind:0",
        "cold": {"bytes": "4MiB", "policy": "bind:0", "eviction_policy": "arc"},
    }
    seen = run_engine("tiers", kv_offload(**extra))
    assert tokens(seen["first"]) == plain_six
    assert tokens(seen["second"]) == plain_six
    assert tokens(seen["together"]) == plain_six
    assert cached(seen["second"]) == [288] * 6, "all of it came back"
    counters = seen["counters"]
    assert counters["stored cold"] == 54
    assert counters["loaded cold"] >= 2 * 54 - 20
    assert counters["evicted cold"] == 0
    assert counters["refused cold"] == 0
    assert counters["evicted hot"] > 54
    # Promotions, and what was computed again because all of the hot tier was in use.
    assert counters["stored hot"] >= 54 + counters["loaded cold"]
    assert seen["granted"] == {"0": seen["slots"] * CHUNK}
    assert seen["pool"] | {"named": False} == seen["pool"]
    # The controls: a damaged cold tier shows, and a reset drops it.
    assert any(a != b for a, b in zip(tokens(seen["damaged"]), plain_six, strict=True))
    assert tokens(seen["after"]) == plain_six
    assert cached(seen["after"]) == [0] * 6


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rule", ["adaptive", "all"])
def test_tokens_are_the_same_when_what_never_comes_back_is_not_stored(
    rule: str, run_engine: RunEngine, plain_tokens: list[list[int]]
) -> None:
    seen = run_engine(
        "declined", kv_offload(cpu_bytes_to_use=2000 * CHUNK, policy="bind:0", admission=rule)
    )
    assert [tokens(each) for each in seen["answers"]] == [plain_tokens] * 3

    def added(event: str) -> list[float]:
        totals = [each.get(f"{event} hot", 0.0) for each in seen["counted"]]
        return [after - before for before, after in itertools.pairwise(totals)]

    hits = [cached(each) for each in seen["answers"]]
    if rule == "all":  # the control
        assert added("stored") == [105 * 9, 36, 0, 0]
        assert added("declined") == [0] * 4
        assert hits == [[0] * 4, [288] * 4, [288] * 4]
        return
    # Then four prompts that are new, and are known the second time, and are there the third time.
    assert 850 < added("stored")[0] < 900
    assert added("stored")[0] + added("declined")[0] == 105 * 9
    assert added("stored")[1:] == [0, 36, 0]
    assert added("declined")[1:] == [36, 0, 0]
    assert added("loaded") == [0, 0, 0, 36]
    assert hits == [[0] * 4, [0] * 4, [288] * 4]
    assert "Traceback" not in seen["log"]
