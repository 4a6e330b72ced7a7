from __future__ import annotations

import statistics

import pytest

from cxl_offload.plan.machine_rates import (
    ASSUMED_BYTES_PER_S_A_CORE,
    ASSUMED_CXL_BYTES_PER_S,
    ASSUMED_LOCAL_BYTES_PER_S,
    ASSUMED_REMOTE_SHARE,
    MachineRates,
    core_bytes_per_s,
)
from cxl_offload.topology import (
    Access,
    Gpu,
    Link,
    Machine,
    Node,
    NodeKind,
    Tier,
    load_machine,
    machine_names,
)


def machine(accesses: tuple[Access, ...], gpus: tuple[Gpu, ...] = ()) -> Machine:
    nodes = (
        Node(0, NodeKind.DRAM, (0, 1), 2**30),
        Node(1, NodeKind.DRAM, (), 2**30),
        Node(2, NodeKind.CXL, (), 2**30),
    )
    tiers = (Tier("ldram", (0,)), Tier("rdram", (1,)), Tier("cxl", (2,)), Tier("nvme", ()))
    distances = {0: {0: 10, 1: 20, 2: 30}}
    return Machine(
        name="made", nodes=nodes, accesses=accesses, gpus=gpus, tiers=tiers, distances=distances
    )


def test_latency_that_is_not_printed_lies_between_its_neighbours_by_distance() -> None:
    numbers = MachineRates(
        machine((Access(0, 0, read_latency_ns=100), Access(0, 2, read_latency_ns=300)))
    )
    assert numbers.latency_ns("rdram") == pytest.approx(200)
    assert any("rdram" in note for note in numbers.notes)
    assert numbers.latency_ns("cxl") == 300


def test_latencies_that_nothing_gives_are_taken_as_equal_with_a_note() -> None:
    numbers = MachineRates(machine((Access(0, 0, read_latency_ns=100),)))
    assert numbers.latencies_ns(["ldram", "cxl"]) == (100, 100)
    assert any("taken as equal" in note for note in numbers.notes)


def test_bandwidth_that_is_not_printed_does_not_bind_and_says_so() -> None:
    numbers = MachineRates(machine(()))
    assert numbers.read_bytes_per_s("ldram") == float("inf")
    assert numbers.notes == [
        "made: no read bandwidth of ldram is known; it is taken to bind nothing"
    ]


def test_a_core_draws_what_those_that_saturate_local_memory_do() -> None:
    known = Access(0, 0, read_bandwidth_bytes_per_s=60e9, read_saturation_threads=3)
    assert core_bytes_per_s(machine((known,))) == 20e9
    assert core_bytes_per_s(machine(())) == ASSUMED_BYTES_PER_S_A_CORE
    assert MachineRates(machine((known,))).planned_read_bytes_per_s("cxl", [2]) == pytest.approx(
        ASSUMED_CXL_BYTES_PER_S
    )
    one_core = Access(0, 0, read_bandwidth_bytes_per_s=60e9, read_saturation_threads=4)
    assert MachineRates(machine((one_core,))).planned_read_bytes_per_s("cxl", [2]) == 30e9


def test_tier_without_memory_or_machine_without_gpu_raise() -> None:
    numbers = MachineRates(machine(()))
    with pytest.raises(ValueError, match="nvme has no memory"):
        numbers.read_bytes_per_s("nvme")
    with pytest.raises(ValueError, match="no GPU"):
        numbers.copy_bytes_per_s("ldram")


def test_copies_without_a_printed_rate_are_bound_by_what_cpus_read() -> None:
    gpu = Gpu("G", node=0, link=Link(h2d_bandwidth_bytes_per_s=50e9))
    numbers = MachineRates(machine((Access(0, 0, read_bandwidth_bytes_per_s=30e9),), (gpu,)))
    assert numbers.copy_bytes_per_s("ldram") == 30e9
    assert any("CPU reads bound it" in note for note in numbers.notes)


def test_assumed_rates_are_medians_of_the_shipped_machines() -> None:
    machines = [load_machine(name) for name in machine_names()]
    found: dict[str, list[float]] = {"ldram": [], "rdram": [], "cxl": []}
    for machine in machines:
        local = machine.access(machine.initiator, machine.initiator)
        own = None if local is None else local.read_bandwidth_bytes_per_s
        for tier in machine.tiers:
            for node in tier.nodes:
                access = machine.access(machine.initiator, node)
                rate = None if access is None else access.read_bandwidth_bytes_per_s
                if rate is None or tier.name not in found:
                    continue
                if tier.name == "rdram" and own is not None:
                    found["rdram"].append(rate / own)
                elif tier.name != "rdram":
                    found[tier.name].append(rate)
    # A file more or less shall not change plans: 8 channels of DDR5-4800, or one channel less.
    assert statistics.median(found["ldram"]) == pytest.approx(ASSUMED_LOCAL_BYTES_PER_S, rel=0.15)
    assert statistics.median(found["rdram"]) == pytest.approx(ASSUMED_REMOTE_SHARE, rel=0.1)
    assert statistics.median(found["cxl"]) == pytest.approx(ASSUMED_CXL_BYTES_PER_S, rel=0.1)
