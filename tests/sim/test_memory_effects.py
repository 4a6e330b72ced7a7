"""Latency under load, lines in flight on mixed nodes, and the reach of the last-level cache."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxl_offload.errors import ConfigError
from cxl_offload.sim import (
    Cache,
    CpuStream,
    Engines,
    Event,
    Trace,
    WorkingSet,
    loaded_latency_ns,
    replay,
)
from cxl_offload.topology import load_machine

from .machines import GB, event, machine


def seconds(one: Event, **options: Any) -> float:
    return replay(Trace([one]), machine(), **options).seconds


def repairman_latency_ns(idle_ns: float, service_ns: float, lines: int) -> float:
    """Oracle: the machine-repairman model's product form, summed term by term."""
    away_ns = idle_ns - service_ns
    weights = [
        math.exp(
            math.lgamma(lines + 1)
            - math.lgamma(lines - queued + 1)
            + queued * math.log(service_ns / away_ns)
        )
        for queued in range(lines + 1)
    ]
    busy = 1 - weights[0] / sum(weights)
    throughput = busy / service_ns
    return lines / throughput


@pytest.mark.parametrize("lines", [1, 2, 7, 20, 40, 100])
def test_loaded_latency_of_one_node_is_that_of_the_repairman_model(lines: int) -> None:
    found = loaded_latency_ns(
        [1.0], idle_latency_ns=[292.0], bandwidth_bytes_per_s=[38.4e9], lines_in_flight=lines
    )
    assert found[0] == pytest.approx(repairman_latency_ns(292.0, 64 / 38.4, lines), rel=1e-9)


SHARES = st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3).filter(lambda s: sum(s) > 0.1)


@settings(max_examples=60, deadline=None)
@given(SHARES, st.floats(1.0, 500.0))
def test_loaded_throughput_lies_below_both_asymptotes_and_latency_grows(
    weights: list[float], lines: float
) -> None:
    shares = np.array(weights) / sum(weights)
    numbers = {
        "idle_latency_ns": [100.0, 200.0, 300.0],
        "bandwidth_bytes_per_s": [100e9, 40e9, 20e9],
    }
    latency = loaded_latency_ns(shares, lines_in_flight=lines, **numbers)
    assert (latency >= np.array([100.0, 200.0, 300.0]) * (1 - 1e-12)).all()
    rate = lines * 64e9 / (shares * latency).sum()
    with np.errstate(divide="ignore", over="ignore"):
        peak = (np.array([100e9, 40e9, 20e9]) / shares).min()
    assert rate <= peak * (1 + 1e-9)
    assert rate <= lines * 64e9 / (shares * np.array([100.0, 200.0, 300.0])).sum() * (1 + 1e-9)
    more = loaded_latency_ns(shares, lines_in_flight=lines * 1.5, **numbers)
    assert (shares * more).sum() >= (shares * latency).sum() * (1 - 1e-9)
    more_rate = lines * 1.5 * 64e9 / (shares * more).sum()
    assert more_rate >= rate * (1 - 1e-9)


def test_loaded_latency_is_flat_at_first_and_littles_law_at_last() -> None:
    few, many = (
        loaded_latency_ns(
            [1.0], idle_latency_ns=[292.0], bandwidth_bytes_per_s=[38.4e9], lines_in_flight=lines
        )[0]
        for lines in (1, 5000)
    )
    assert few == pytest.approx(292.0)
    assert many == pytest.approx(5000 * 64 / 38.4, rel=1e-3)
    with pytest.raises(ValueError, match="at least 1"):
        loaded_latency_ns(
            [1.0], idle_latency_ns=[1.0], bandwidth_bytes_per_s=[1.0], lines_in_flight=0.5
        )


def test_replay_charges_loaded_latency() -> None:
    work = event("cpu", {2: 20 * GB})
    engines = Engines(lines_in_flight=94, loaded_latency=True)
    expected = repairman_latency_ns(300.0, 64 / 20, 94) * 1e-9 * 20 * GB / 64 / 94
    assert seconds(work, engines=engines) == pytest.approx(expected)
    assert (
        seconds(work, engines=engines) > seconds(work, engines=Engines(lines_in_flight=94)) * 1.05
    )


def test_lines_in_flight_wait_for_the_mean_latency_of_the_nodes() -> None:
    """10 lines, three quarters of the bytes 100 ns away and a quarter 300 ns: 150 ns a line."""
    work = event("cpu", {0: 3 * GB, 2: GB})
    assert seconds(work, engines=Engines(lines_in_flight=10)) == pytest.approx(
        4 * GB / 64 / 10 * 150e-9
    )


def test_mixed_nodes_get_fewer_lines_and_single_ones_all() -> None:
    engines = Engines(lines_in_flight=10, mixed_lines_in_flight=5)
    alone, mixed = event("cpu", {2: GB}, {2: GB}), event("cpu", {0: GB, 2: GB})
    all_lines = Engines(lines_in_flight=10)
    assert seconds(alone, engines=engines) == pytest.approx(seconds(alone, engines=all_lines))
    assert seconds(mixed, engines=engines) == pytest.approx(2 * seconds(mixed, engines=all_lines))


@pytest.mark.parametrize(
    "fields",
    [
        {"loaded_latency": True},
        {"mixed_lines_in_flight": 3.0},
        {"lines_in_flight": 0.5, "loaded_latency": True},
        {"lines_in_flight": 5.0, "mixed_lines_in_flight": 0.0},
    ],
)
def test_engines_that_make_no_sense_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Engines(**fields)


def test_latency_that_the_machine_lacks_is_named() -> None:
    published = load_machine("epyc9354-cxl-a")
    trace = Trace([event("cpu", {1: GB})])
    assert replay(trace, published).seconds > 0
    with pytest.raises(ConfigError, match="no latency from node 0 to node 1"):
        replay(trace, published, engines=Engines(lines_in_flight=100))


def test_random_accesses_hit_for_what_fits_and_streams_all_or_nothing() -> None:
    cache = Cache(
        {0: 1 * GB, 2: 4 * GB},
        {"kv": WorkingSet(4 * GB, "random"), "weights": WorkingSet(4 * GB, "stream")},
    )
    assert cache.hit_share("kv", 0) == pytest.approx(0.25)
    assert cache.hit_share("kv", 2) == 1.0
    assert cache.hit_share("kv", 1) == 0.0
    assert cache.hit_share("weights", 0) == 0.0
    assert cache.hit_share("weights", 2) == 1.0
    assert cache.hit_share("act", 2) == 0.0
    on_dram = event("cpu", {0: 100 * GB})
    assert seconds(on_dram, cache=cache) == pytest.approx(0.75)
    assert seconds(event("cpu", {2: 100 * GB}), cache=cache) == 0.0
    assert seconds(event("h2d", {0: 10 * GB}), cache=cache) == pytest.approx(1.001)
    timeline = replay(Trace([on_dram]), machine(), cache=cache)
    assert timeline.node_bytes == {0: 100 * GB}
    assert timeline.resource_seconds["decode"]["node 0"] == pytest.approx(0.75)


def test_working_set_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError):
        WorkingSet(0, "random")
    with pytest.raises(ConfigError):
        WorkingSet(1, "zigzag")  # type: ignore[arg-type]


def test_cxl_memory_without_a_dma_rate_is_refused_for_copies() -> None:
    bare = machine(dma_paths=())
    assert replay(Trace([event("h2d", {0: 10 * GB})]), bare).seconds == pytest.approx(1.001)
    with pytest.raises(ConfigError, match="h2d DMA bandwidth of GPU gpu0 on node 2"):
        replay(Trace([event("h2d", {2: GB})]), bare)


def test_gpu_event_with_host_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="h2d or a d2h"):
        replay(Trace([event("gpu", {0: GB})]), machine())


FACTORS = st.floats(1.0, 4.0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), FACTORS), min_size=1, max_size=8), FACTORS)
def test_faster_link_is_never_slower_for_copies_side_by_side(
    sizes: list[tuple[int, float]], factor: float
) -> None:
    events = [
        event("h2d", {0: int(size * GB), 1: int(part * GB)}, queue=str(at))
        for at, (size, part) in enumerate(sizes)
    ]
    slow = machine()
    gpu = slow.gpus[0]
    assert gpu.link is not None
    link = dataclasses.replace(gpu.link, h2d_bandwidth_bytes_per_s=10 * GB * factor)
    fast = machine(gpus=(dataclasses.replace(gpu, link=link),))
    before, after = (replay(Trace(events), each) for each in (slow, fast))
    assert after.seconds <= before.seconds * (1 + 1e-9)
    assert (after.ends_s <= before.ends_s * (1 + 1e-9)).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=12))
def test_copies_over_one_link_end_as_in_processor_sharing(sizes: list[int]) -> None:
    """The i-th smallest of n ends when every one has moved what it can: the sum of min(a, b)."""
    events = [event("h2d", {0: size * 10**5}, queue=str(at)) for at, size in enumerate(sizes)]
    timeline = replay(Trace(events), machine())
    expected = [
        0.001 + sum(min(other, size) for other in sizes) * 1e5 / (10 * GB) for size in sizes
    ]
    np.testing.assert_allclose(timeline.ends_s, expected, rtol=1e-6)


STREAM = CpuStream(bytes_per_s=50e9, latency_ns=100.0, cores=4)


def test_cpus_work_through_their_own_memory_at_their_own_rate() -> None:
    """The test machine's node 0 gives 100 GB/s at 100 ns, CXL memory 20 GB/s at 300 ns."""
    work = event("cpu", {0: 60 * GB}, {0: 40 * GB})
    assert seconds(work, engines=Engines(cpu_stream=STREAM)) == pytest.approx(100 * GB / 50e9)


def test_a_slower_node_bounds_cpus_that_could_do_more() -> None:
    work = event("cpu", {2: 20 * GB})
    assert seconds(work, engines=Engines(cpu_stream=STREAM)) == pytest.approx(1.0)


def test_first_line_of_every_span_waits_for_slower_memory() -> None:
    """4 KiB pages, one after the other on each core: 200 ns more for each on CXL memory."""
    slow = dataclasses.replace(STREAM, bytes_per_s=4e9)
    pages = 1_000_000
    work = event("cpu", {0: pages * 4096, 2: pages * 4096})
    by_hand = 2 * pages * 4096 / 4e9 + pages * 200e-9 / 4
    assert seconds(work, engines=Engines(cpu_stream=slow)) == pytest.approx(by_hand)
    near = dataclasses.replace(slow, latency_ns=1000.0)
    assert seconds(work, engines=Engines(cpu_stream=near)) == pytest.approx(2 * pages * 4096 / 4e9)


def test_streams_that_mean_nothing_are_refused() -> None:
    for wrong in ({"bytes_per_s": 0.0}, {"bytes_per_s": math.inf}, {"latency_ns": -1.0}):
        with pytest.raises(ConfigError, match="finite rate above 0"):
            dataclasses.replace(STREAM, **wrong)
    for wrong in ({"cores": 0}, {"span_bytes": 0}):
        with pytest.raises(ConfigError, match="each is at least 1"):
            dataclasses.replace(STREAM, **wrong)
