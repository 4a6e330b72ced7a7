"""Times of small traces worked out by hand, and what holds for every trace."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxl_offload.errors import ConfigError
from cxl_offload.sim import Engines, Event, Trace, replay
from cxl_offload.topology import Gpu, Link, load_machine

from .machines import GB, event, machine, speeds


def seconds(*events: Event, **options: Any) -> float:
    return replay(Trace(events), machine(), **options).seconds


@pytest.mark.parametrize(
    ("one", "expected_s"),
    [
        (event("cpu", {0: 100 * GB}), 1.0),
        (event("cpu", {}, {0: 100 * GB}), 2.0),
        (event("cpu", {0: 100 * GB}, {0: 100 * GB}), 3.0),
        (event("cpu", {0: 100 * GB, 2: 20 * GB}), 1.0),  # parts on two nodes at once
        (event("cpu", {0: 50 * GB, 2: 50 * GB}), 2.5),  # the slower half bounds the whole
        (event("cpu", {1: 40 * GB}), 1.0),
        (event("h2d", {0: 10 * GB}), 1.001),
        (event("d2h", {}, {0: 10 * GB}), 1.001),
        (event("h2d", {2: 10 * GB}), 2.002),  # the tier's DMA below the link, and its latency
        (event("h2d", {0: 5 * GB, 2: 5 * GB}), 1.002),  # half from each: the link bounds
        (event("h2d", {0: 0}, accelerator_bytes=10 * GB), 1.001),
        (event("gpu", flops=2e12, accelerator_bytes=100 * GB), 2.0),
        (event("gpu", flops=1e11, accelerator_bytes=3000 * GB), 3.0),
        (event("nvme", {}, {0: 4 * GB}), 2.0),
        (event("nvme", {0: 4 * GB}), 4.0),
        (event("cpu"), 0.0),
        (event("h2d", {0: 0}), 0.001),
    ],
)
def test_one_event_takes_the_largest_of_its_demands(one: Event, expected_s: float) -> None:
    assert seconds(one) == pytest.approx(expected_s)


def test_events_of_a_queue_run_one_after_another() -> None:
    assert seconds(event("cpu", {0: 100 * GB}), event("cpu", {2: 20 * GB})) == pytest.approx(2.0)


def test_event_that_moves_nothing_holds_nobody_up() -> None:
    first = event("cpu", queue="a")
    copy = event("h2d", {0: 10 * GB}, queue="a")
    beside = event("cpu", {0: 20 * GB}, queue="b")
    assert seconds(first, copy, beside) == pytest.approx(1.001)


def test_queues_that_share_nothing_run_side_by_side() -> None:
    both = (event("cpu", {0: 100 * GB}, queue="a"), event("gpu", flops=3e12, queue="b"))
    assert seconds(*both) == pytest.approx(3.0)


def test_two_copies_over_one_link_get_half_of_it_each() -> None:
    """10 and 30 GB: both at 5 GB/s for 2 s after their set-ups, then the second alone at 10."""
    trace = Trace([event("h2d", {0: 10 * GB}, queue="a"), event("h2d", {0: 30 * GB}, queue="b")])
    timeline = replay(trace, machine())
    np.testing.assert_allclose(timeline.ends_s, [2.001, 4.001])


def test_copies_in_both_directions_do_not_share_the_link() -> None:
    both = (event("h2d", {0: 10 * GB}, queue="a"), event("d2h", {}, {0: 10 * GB}, queue="b"))
    assert seconds(*both) == pytest.approx(1.001)


def test_cpu_work_and_a_copy_share_the_memory_they_both_need() -> None:
    """CXL gives 20 GB/s; the copy takes the 5 that its DMA can, and the CPU gets the rest."""
    both = (event("cpu", {2: 20 * GB}, queue="a"), event("h2d", {2: 20 * GB}, queue="b"))
    timeline = replay(Trace(both), machine())
    copy_share = 5 / 20  # of the node, when the copy runs at its full 5 GB/s
    # The CPU alone until the set-up is over, then beside a copy that never asks for half.
    done_before = 0.002 * 20
    expected = 0.002 + (20 - done_before) / (20 * (1 - copy_share))
    assert timeline.ends_s[0] == pytest.approx(expected)
    assert timeline.ends_s[1] == pytest.approx(4.002)


def test_steps_are_barriers_in_the_order_of_their_numbers() -> None:
    trace = Trace(
        [
            event("cpu", {0: 100 * GB}, step=7, queue="a"),
            event("cpu", {0: 300 * GB}, step=2, queue="b"),
        ]
    )
    timeline = replay(trace, machine())
    np.testing.assert_allclose(timeline.starts_s, [3.0, 0.0])
    np.testing.assert_allclose(timeline.ends_s, [4.0, 3.0])


def test_phases_queues_links_and_tokens_are_summed() -> None:
    trace = Trace(
        [
            event("h2d", {0: 10 * GB}, phase="prefill", step=0, queue="load"),
            event("cpu", {0: 200 * GB}, step=1, queue="compute"),
            event("d2h", {}, {2: 5 * GB}, step=2, queue="store"),
        ],
        tokens={"prefill": 100, "decode": 12},
    )
    timeline = replay(trace, machine())
    assert timeline.phase_seconds == pytest.approx({"prefill": 1.001, "decode": 3.002})
    assert timeline.queue_seconds == pytest.approx({"load": 1.001, "compute": 2.0, "store": 1.002})
    assert timeline.link_bytes == {"h2d": 10 * GB, "d2h": 5 * GB}
    assert timeline.node_bytes == {0: 210 * GB, 2: 5 * GB}
    assert timeline.tokens_per_s["decode"] == pytest.approx(12 / 3.002)
    assert timeline.bottleneck("prefill") == "link gpu0 h2d"
    assert timeline.bottleneck("decode") in ("node 0", "path 0-0")
    assert timeline.utilisation("decode")["path 0-0"] == pytest.approx(2 / 3.002)
    assert timeline.phase_shares() == pytest.approx(
        {"prefill": 1.001 / 4.003, "decode": 3.002 / 4.003}
    )
    assert timeline.to_json()["kind"] == "simulated"


def test_lines_in_flight_bound_bandwidth_by_latency() -> None:
    """100 lines of 64 B every 300 ns from CXL: 21.3 GB/s would do, 50 lines are the bound."""
    work = event("cpu", {2: 20 * GB})
    assert seconds(work, engines=Engines(lines_in_flight=100)) == pytest.approx(1.0)
    bound = 50 * 64 / 300e-9
    assert seconds(work, engines=Engines(lines_in_flight=50)) == pytest.approx(20 * GB / bound)


def test_cpu_arithmetic_counts_when_its_peak_is_given() -> None:
    work = event("cpu", {0: 100 * GB}, flops=3e12)
    assert seconds(work) == pytest.approx(1.0)
    assert seconds(work, engines=Engines(cpu_flops_per_s=1e12)) == pytest.approx(3.0)


def test_initiator_decides_what_the_cpus_reach() -> None:
    assert seconds(event("cpu", {1: 100 * GB}), initiator=1) == pytest.approx(1.0)
    assert seconds(event("cpu", {1: 100 * GB}), initiator=0) == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("changes", "work", "named"),
    [
        ({"gpus": (), "dma_paths": ()}, event("h2d", {0: 1}), "GPU"),
        ({"gpus": (Gpu("g"),), "dma_paths": ()}, event("h2d", {0: 1}), "link of GPU g"),
        (
            {"gpus": (Gpu("g", link=Link()),), "dma_paths": ()},
            event("d2h", {}, {0: 1}),
            "d2h bandwidth",
        ),
        ({"gpus": (Gpu("g"),), "dma_paths": ()}, event("gpu", flops=1.0), "peak of GPU g"),
        ({"accesses": ()}, event("cpu", {2: 1}), "from node 0 to node 2"),
        ({"drives": ()}, event("nvme", {0: 1}), "drive"),
    ],
)
def test_missing_number_is_named(changes: dict[str, Any], work: Event, named: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        replay(Trace([work]), machine(**changes))
    assert named in str(refusal.value)
    assert "round-numbers" in str(refusal.value)


def test_node_that_the_machine_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="no node 9"):
        replay(Trace([event("h2d", {9: 1})]), machine())


def test_empty_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        replay(Trace(), machine())


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_engine_rates_that_mean_nothing_are_refused(value: float) -> None:
    with pytest.raises(ConfigError):
        Engines(lines_in_flight=value)


SIZES = st.integers(0, 50).map(lambda gigabytes: gigabytes * GB)
PER_NODE = st.dictionaries(st.sampled_from([0, 1, 2]), SIZES, max_size=3)


@st.composite
def events(draw: st.DrawFn) -> Event:
    engine = draw(st.sampled_from(["h2d", "d2h", "cpu", "gpu", "nvme"]))
    return event(
        engine,
        draw(PER_NODE) if engine not in ("d2h", "gpu") else {},
        draw(PER_NODE) if engine not in ("h2d", "gpu") else {},
        step=draw(st.integers(0, 2)),
        queue=draw(st.sampled_from("abcd")),
        flops=draw(st.sampled_from([0.0, 1e12])) if engine == "gpu" else 0.0,
        accelerator_bytes=draw(SIZES) if engine == "gpu" else 0,
    )


def brute_force(trace: Trace, ticks: int) -> float:
    """Oracle: advance all running events in tiny ticks.

    Written from the description of the model alone, but for how resources are shared, which has
    tests of its own.
    """
    rates = {
        ("path", 0): 100e9, ("path", 1): 40e9, ("path", 2): 20e9,
        ("node", 0): 100e9, ("node", 1): 100e9, ("node", 2): 20e9,
        "h2d": 10e9, "d2h": 10e9, ("dma h2d", 2): 5e9, ("dma d2h", 2): 5e9,
        "hbm": 1000e9, "flops": 1e12, "load": 2e9, "store": 1e9,
    }  # fmt: skip

    numbers: dict[Any, int] = {}

    def uses(one: Event) -> dict[int, float]:
        use: dict[int, float] = {}

        def add(name: Any, seconds: float) -> None:
            if seconds:
                number = numbers.setdefault(name, len(numbers))
                use[number] = use.get(number, 0.0) + seconds

        for way, sizes in (("read", one.read_bytes), ("write", one.write_bytes)):
            for node, size in sizes.items():
                add(("node", node), size / rates["node", node])
                if one.engine == "cpu":
                    slow = 2 if (node, way) == (0, "write") else 1
                    add(("path", node), slow * size / rates["path", node])
                if one.engine in ("h2d", "d2h"):
                    add(one.engine, size / rates[one.engine])
                    if node == 2:
                        add((f"dma {one.engine}", 2), size / 5e9)
                if one.engine == "nvme":
                    kind = "load" if way == "write" else "store"
                    add(kind, size / rates[kind])
        if one.engine == "gpu":
            add("hbm", one.accelerator_bytes / rates["hbm"])
            add("flops", one.flops / rates["flops"])
        return use

    def setup(one: Event) -> float:
        if one.engine not in ("h2d", "d2h"):
            return 0.0
        touched = one.read_bytes.get(2, 0) + one.write_bytes.get(2, 0)
        return 0.002 if touched else 0.001

    total = 0.0
    tick = max(0.002, replay(trace, machine()).seconds / ticks)
    for step in sorted({one.step for one in trace}):
        queues: dict[str, list[list[Any]]] = {}
        for one in trace:
            if one.step == step:
                use = uses(one)
                queues.setdefault(one.queue, []).append(
                    [setup(one), max(use.values(), default=0.0), use]
                )
        known: dict[tuple[int, ...], list[float]] = {}
        while any(queues.values()):
            for queue in queues.values():
                while queue and queue[0][0] <= 0 and queue[0][1] <= 0:
                    queue.pop(0)
            heads = [queue[0] for queue in queues.values() if queue]
            working = [head for head in heads if head[0] <= 0]
            key = tuple(id(head) for head in working)
            if key not in known:
                known[key] = speeds([head[2] for head in working])
            for head in heads:
                if head[0] > 0:
                    head[0] -= tick
            for head, speed in zip(working, known[key], strict=True):
                head[1] -= speed * tick
            total += tick if heads else 0.0
    return total


@settings(max_examples=25, deadline=None)
@given(st.lists(events(), min_size=1, max_size=10))
def test_replay_agrees_with_tiny_ticks(made: list[Event]) -> None:
    trace = Trace(made)
    found = replay(trace, machine()).seconds
    # Every event may be late by two ticks.
    assert brute_force(trace, 2000) == pytest.approx(found, rel=0.005, abs=0.05 + 0.004 * len(made))


@settings(max_examples=100, deadline=None)
@given(st.lists(events(), min_size=1, max_size=20))
def test_no_resource_is_ever_used_more_than_it_gives(made: list[Event]) -> None:
    timeline = replay(Trace(made), machine())
    for phase, busy in timeline.resource_seconds.items():
        for name, occupied in busy.items():
            assert occupied <= timeline.phase_seconds[phase] * (1 + 1e-9) + 1e-12, name
    assert timeline.phase_seconds["decode"] == pytest.approx(timeline.seconds)
    assert (timeline.ends_s >= timeline.starts_s).all()
    assert timeline.ends_s.max() == pytest.approx(timeline.seconds)


@settings(max_examples=50, deadline=None)
@given(st.lists(events(), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_order_between_queues_does_not_matter(made: list[Event], order: random.Random) -> None:
    by_queue: dict[tuple[int, str], list[Event]] = {}
    for one in made:
        by_queue.setdefault((one.step, one.queue), []).append(one)
    groups = list(by_queue.values())
    order.shuffle(groups)
    shuffled = [one for group in groups for one in group]
    assert seconds(*shuffled) == pytest.approx(seconds(*made))


@settings(max_examples=50, deadline=None)
@given(st.lists(events(), min_size=1, max_size=12))
def test_every_event_in_a_queue_of_its_own_step_takes_longest(made: list[Event]) -> None:
    """With one event at a time nothing overlaps: an upper bound of every other arrangement."""
    alone = [dataclasses.replace(one, step=at, queue="q") for at, one in enumerate(made)]
    assert seconds(*made) <= seconds(*alone) * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(st.lists(events(), min_size=1, max_size=8))
def test_replay_of_a_saved_trace_is_the_same(made: list[Event]) -> None:
    trace = Trace(made)
    assert replay(Trace.from_json(trace.to_json()), machine()).seconds == seconds(*made)


def test_published_machine_has_what_a_flexgen_run_needs() -> None:
    published = load_machine("epyc9354-cxl-a")
    trace = Trace(
        [
            event("h2d", {2: GB}, queue="load_weight"),
            event("cpu", {0: GB, 1: GB, 2: GB}, {0: GB}, queue="compute"),
            event("gpu", flops=1e12, accelerator_bytes=GB, queue="compute"),
            event("d2h", {}, {0: GB}, queue="store_cache"),
            event("nvme", {}, {0: GB}, queue="load_cache"),
        ]
    )
    assert replay(trace, published).seconds > 0
