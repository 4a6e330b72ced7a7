"""Full tiers, aborted requests, sleep, failing copies, killed workers: right tokens or an error."""

from __future__ import annotations

import pytest

from tests.integrations.vllm.conftest import RunEngine, kv_offload, left_behind, shared_files
from tests.integrations.vllm.test_kv_tokens import cached, tokens
from tests.integrations.vllm.tiny_model import CHUNK


@pytest.mark.timeout(300)
def test_tokens_are_right_or_an_error_whatever_happens_to_the_tiers(
    run_engine: RunEngine, plain_six: list[list[int]]
) -> None:
    # Each prompt has 9 chunks: two fill the hot tier, three the cold one.
    options = kv_offload(
        cpu_bytes_to_use=20 * CHUNK,
        eviction_policy="cost",
        prefill_tokens_per_s=5000,
        cold={
            "bytes": 30 * CHUNK,
            "policy": "bind:0",
            "eviction_policy": "cost",
            "pending_bytes": 12 * CHUNK,
        },
    )
    before = shared_files()
    seen = run_engine("trouble", options)
    for name, answers in seen["answers"].items():
        assert tokens(answers) == plain_six, name
    assert seen["in_use"] == [0, 0], "every chunk can be evicted again"
    counters = seen["counters"]
    assert counters["evicted hot"] > 0
    assert counters["evicted cold"] > 0
    assert counters["loaded cold"] > 0
    assert counters["refused hot"] > 0, "six prompts at once do not fit"
    assert "load KV blocks: injected" in seen["log"]
    assert seen["said"], "a copy that fails gives an error, never tokens"
    assert not left_behind(before)


@pytest.mark.timeout(300)
def test_ranks_share_one_pool_and_a_killed_rank_is_an_error(
    run_engine: RunEngine, plain_tokens: list[list[int]]
) -> None:
    before = shared_files()
    seen = run_engine(
        "parallel",
        {"tensor_parallel_size": 2} | kv_offload(cpu_bytes_to_use="8MiB", blocks_per_chunk=2),
        {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
    )
    assert cached(seen["first"]) == [0] * 4
    assert cached(seen["again"]) == [256] * 4
    assert tokens(seen["again"]) == tokens(seen["first"])
    assert all(
        damaged != right
        for damaged, right in zip(tokens(seen["damaged"]), tokens(seen["first"]), strict=True)
    )
    first, second = seen["pools"]
    assert first["shared"] == second["shared"], "the same inode"
    assert len(first["shared"]) == 1
    for each in (first, second):
        assert each["nbytes"] == 8 << 20
        assert each["granted"]["0"] >= 4 << 20, "a rank's own slots, placed by that rank"
        assert not each["named"]
    assert seen["said"], "an error, and not a wait without end"
    assert not left_behind(before)
