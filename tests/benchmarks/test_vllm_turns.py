"""Turns of servers that were several processes: what they did is added, times are paired."""

from __future__ import annotations

import pytest

from benchmarks.neighbour import QUIET
from benchmarks.vllm_cases import LOADS, NEVER, NONE, ONE
from benchmarks.vllm_load import Answered, LoadRun
from benchmarks.vllm_turns import Taken, results_of
from cxl_offload.integrations.vllm.serving_report import Samples, parse_metrics


def reading(prompt: float, hits: float, stored: float) -> Samples:
    source = 'vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"}'
    return parse_metrics(
        f'vllm:prompt_tokens_total{{engine="0"}} {prompt}\n'
        f"{source} {hits}\n"
        f'vllm:kv_offload_store_bytes_total{{engine="0"}} {stored}\n'
    )


def taken(seconds: list[float], stored: float) -> Taken:
    runs = [LoadRun(each, (Answered(0.1, 0.2, (1,)),)) for each in seconds]
    begins = [reading(100, 50, 7), reading(10, 5, 0)]
    ends = [reading(200, 90, 7 + stored), reading(310, 65, stored)]
    return Taken({QUIET: runs}, begins, ends)


def test_processes_of_a_server_are_told_as_one() -> None:
    turns = {NONE: taken([1.0, 2.0], 0), ONE: taken([2.0, 4.0], 30)}
    found = results_of(turns, LOADS[NEVER])
    assert found[ONE]["throughput_ratio"]["median"] == 0.5
    assert found[ONE]["stored_bytes"] == 60, "not what was stored before the turns"
    assert found[NONE]["stored_bytes"] == 0
    assert found[ONE]["hit_rate"] == pytest.approx((40 + 60) / (100 + 300))
