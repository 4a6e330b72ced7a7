"""Shares, best sizes and mean ratios of vLLM's weight offload."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cxl_offload.plan.vllm.offload import tokens_per_s
from cxl_offload.validation.offload_sizes import (
    best_offload_bytes,
    copy_fraction,
    mean_throughput_ratio,
)

from ..plan.vllm.test_offload import CASE, GIB


def test_a_slow_link_takes_all_of_a_step_and_none_where_nothing_is_offloaded() -> None:
    slow = replace(CASE, link_bytes_per_s=1e6)
    assert copy_fraction(slow, 70 * GIB) == pytest.approx(1, abs=1e-4)
    assert copy_fraction(replace(CASE, gpu_memory_bytes=400 * GIB), 0) == 0


def test_mean_ratio_is_the_mean_of_the_sizes() -> None:
    fast = replace(CASE, link_bytes_per_s=2 * CASE.link_bytes_per_s)
    sizes = [70 * GIB, 100 * GIB]
    each = [tokens_per_s(fast, size) / tokens_per_s(CASE, size) for size in sizes]
    assert mean_throughput_ratio(fast, CASE, sizes) == pytest.approx(sum(each) / 2)
    assert 1 < min(each) <= max(each) <= 2


def test_best_offload_is_the_highest_of_the_grid() -> None:
    grid = [gib * GIB for gib in (100, 70, 90, 80)]
    best = best_offload_bytes(CASE, grid)
    assert tokens_per_s(CASE, best) == max(tokens_per_s(CASE, offload) for offload in grid)
    assert best_offload_bytes(CASE, [10 * GIB, 70 * GIB]) == 70 * GIB


def test_no_room_for_kv_decodes_nothing_and_names_no_best() -> None:
    assert tokens_per_s(CASE, 10 * GIB) == 0
    with pytest.raises(ValueError, match="no size of the grid"):
        best_offload_bytes(CASE, [10 * GIB, 20 * GIB])
    with pytest.raises(ValueError, match="leaves no GPU memory"):
        mean_throughput_ratio(CASE, CASE, [10 * GIB])
