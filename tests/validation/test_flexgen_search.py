from __future__ import annotations

from dataclasses import replace

import pytest

from cxl_offload.plan.gpu import GpuRates
from cxl_offload.plan.hardware import Hardware, HostNode
from cxl_offload.validation import flexgen_search
from cxl_offload.validation.flexgen_search import SearchRequest
from cxl_offload.validation.flexgen_shape import throughput
from cxl_offload.validation.footprint import (
    ElementBytes,
    Lengths,
    LlmShape,
    host_bytes,
    kv_bytes_per_sequence,
)

GIB = 2**30
NODES = tuple(
    HostNode(
        name=name,
        tier=name,
        node=at,
        usable_bytes=0,
        read_bytes_per_s=rate,
        latency_ns=latency,
        copy_bytes_per_s=rate,
    )
    for at, (name, rate, latency) in enumerate((("ldram", 400e9, 140), ("cxl", 40e9, 290)))
)
MACHINE = Hardware("made", NODES, 25e9, 140, GpuRates(125e12, 600e9), 0, 0, 32, 7e9, 7e9)
OPT = LlmShape(params=30e9, layers=48, width=7168, heads=56, kv_heads=56)
REQUEST = SearchRequest(
    llm=OPT,
    sizes=ElementBytes(2, 2, 2),
    lengths=Lengths(1024, 64),
    host_capacity_bytes=(80 * GIB, 40 * GIB),
    gpu_memory_bytes=16 * GIB,
)


def test_search_equals_trying_every_batch_of_every_gpu_batch() -> None:
    found = flexgen_search.search(REQUEST, MACHINE)
    best = 0.0
    for gpu_batch in flexgen_search.GPU_BATCHES:
        for rounds in range(1, 100):
            place = flexgen_search._place(REQUEST, batch=gpu_batch * rounds, gpu_batch=gpu_batch)
            if place is not None:
                rate = throughput(MACHINE, OPT, REQUEST.sizes, REQUEST.lengths, place).overall
                best = max(best, rate)
    assert found is not None
    assert found.tokens_per_s == best > 0


def test_chosen_batch_fits_host_and_gpu() -> None:
    found = flexgen_search.search(REQUEST, MACHINE)
    assert found is not None
    place = found.placement
    on_host = host_bytes(
        OPT,
        REQUEST.sizes,
        REQUEST.lengths,
        batch=place.batch,
        kv_gpu_fraction=place.kv_gpu_fraction,
    )
    kv = kv_bytes_per_sequence(OPT, REQUEST.sizes, REQUEST.lengths) * place.batch
    assert on_host < 120 * GIB
    assert kv * place.kv_gpu_fraction < 16 * GIB
    assert sum(place.host_shares) == pytest.approx(1)


def test_twice_the_host_memory_gives_more_throughput() -> None:
    small = flexgen_search.search(replace(REQUEST, host_capacity_bytes=(80 * GIB, 0)), MACHINE)
    large = flexgen_search.search(
        replace(REQUEST, host_capacity_bytes=(80 * GIB, 80 * GIB)), MACHINE
    )
    assert small is not None
    assert large is not None
    assert large.tokens_per_s > small.tokens_per_s
    assert large.placement.batch > small.placement.batch


def test_nothing_fits_when_host_or_gpu_is_too_small() -> None:
    tiny_host = replace(REQUEST, host_capacity_bytes=(50 * GIB, 5 * GIB))
    tiny_gpu = replace(REQUEST, gpu_memory_bytes=1 * GIB)
    assert flexgen_search.search(tiny_host, MACHINE) is None
    assert flexgen_search.search(tiny_gpu, MACHINE) is None


def test_drive_is_used_only_where_it_pays() -> None:
    with_drive = replace(REQUEST, drive_capacity_bytes=500 * GIB)
    found = flexgen_search.search(with_drive, MACHINE)
    without = flexgen_search.search(REQUEST, MACHINE)
    assert found is not None
    assert without is not None
    assert found.tokens_per_s >= without.tokens_per_s
    too_big = replace(with_drive, host_capacity_bytes=(50 * GIB, 5 * GIB))
    spilled = flexgen_search.search(too_big, MACHINE)
    assert spilled is not None
    assert spilled.placement.drive_share > 0


def test_sequences_without_bytes_raise() -> None:
    empty = replace(REQUEST, sizes=ElementBytes(2, 0, 0))
    with pytest.raises(ValueError, match="no bytes"):
        flexgen_search.search(empty, MACHINE)


def test_coarse_walk_over_many_batches_keeps_the_largest() -> None:
    candidates = flexgen_search._candidates(1000)
    assert max(candidates) == 1000
    assert len(candidates) <= flexgen_search.COARSE_STEPS
