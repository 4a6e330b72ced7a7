"""Work of the CPUs that an event names: their paths, their arithmetic, and the files of traces."""

from __future__ import annotations

import json

import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.sim import CpuStream, Engines, Trace, replay
from cxl_offload.sim.trace import Event
from cxl_offload.topology import Access, Machine, Node, NodeKind

NEAR, ACROSS = 100e9, 40e9


def machine() -> Machine:
    """Two sockets, the second with half of the cores."""
    return Machine(
        name="two",
        nodes=(
            Node(0, NodeKind.DRAM, (0, 1, 2, 3), 2**36),
            Node(1, NodeKind.DRAM, (4, 5), 2**36),
        ),
        accesses=tuple(
            Access(core, node, 100, 100, *[NEAR if core == node else ACROSS] * 2)
            for core in (0, 1)
            for node in (0, 1)
        ),
    )


def event(queue: str, cpus: int | None, read: dict[int, int], flops: float = 0.0) -> Event:
    return Event("decode", 0, queue, "cpu", "weights", read, {}, 0, flops, cpus)


def seconds(*events: Event, engines: Engines | None = None) -> float:
    return replay(Trace(events), machine(), engines=engines).phase_seconds["decode"]


def test_named_cpus_read_over_their_own_paths() -> None:
    assert seconds(event("a", None, {1: 10**9})) == pytest.approx(1e9 / ACROSS)
    assert seconds(event("a", 0, {1: 10**9})) == pytest.approx(1e9 / ACROSS)
    assert seconds(event("a", 1, {1: 10**9})) == pytest.approx(1e9 / NEAR)


def test_both_sockets_read_at_once_and_share_a_node() -> None:
    near = [event("a", 0, {0: 10**9}), event("b", 1, {1: 10**9})]
    assert seconds(*near) == pytest.approx(1e9 / NEAR)
    one_node = [event("a", 0, {0: 10**9}), event("b", 1, {0: 10**9})]
    assert seconds(*one_node) >= 2e9 / NEAR * (1 - 1e-9)


def test_arithmetic_is_that_of_their_cores() -> None:
    engines = Engines(cpu_flops_per_s=4e9)
    assert seconds(event("a", 0, {}, 4e9), engines=engines) == pytest.approx(1)
    assert seconds(event("a", 1, {}, 4e9), engines=engines) == pytest.approx(2)
    both = [event("a", 0, {}, 4e9), event("b", 1, {}, 2e9)]
    assert seconds(*both, engines=engines) == pytest.approx(1)


def test_files_without_named_cpus_are_as_they_were() -> None:
    plain = Trace([event("a", None, {0: 1})])
    assert "cpus" not in json.loads(plain.to_json())["columns"]
    named = Trace([event("a", 1, {0: 1}), event("a", None, {0: 1})])
    for trace in (plain, named):
        assert Trace.from_json(trace.to_json()) == trace


def test_what_named_cpus_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="CPUs of node 1 for engine 'h2d'"):
        Event("decode", 0, "a", "h2d", "weights", {0: 1}, {}, cpus=1)
    with pytest.raises(ConfigError, match="work of the CPUs of node 1; leave them out"):
        seconds(event("a", 1, {0: 1}), engines=Engines(lines_in_flight=10))
    stream = CpuStream(bytes_per_s=1e9, latency_ns=100, cores=1)
    with pytest.raises(ConfigError, match=r"cpu_stream: .* node 1; leave them out"):
        seconds(event("a", 1, {0: 1}), engines=Engines(cpu_stream=stream))
    lacking = Machine(name="x", nodes=machine().nodes, accesses=machine().accesses[:2])
    with pytest.raises(ConfigError, match="from node 1 to node 0"):
        replay(Trace([event("a", 1, {0: 1})]), lacking)
