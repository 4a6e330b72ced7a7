"""What the cores of every socket read where: measured, printed, or taken as the first socket's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.plan.hardware import Hardware, hardware_of
from cxl_offload.topology import Access, Machine, load_machine, machine_names

NAME = "xeon8470-cxl-b"


def hardware(machine: Machine, sockets: int = 2) -> Hardware:
    return hardware_of(machine, needs_gpu=False, sockets=sockets)


def with_accesses(machine: Machine, rates: dict[tuple[int, int], float]) -> Machine:
    others = [a for a in machine.accesses if (a.initiator, a.target) not in rates]
    made = [Access(*pair, read_bandwidth_bytes_per_s=rate) for pair, rate in rates.items()]
    return replace(machine, accesses=(*others, *made))


@pytest.mark.parametrize("name", machine_names())
def test_one_socket_is_planned_with_as_before(name: str) -> None:
    machine = load_machine(name)
    one = hardware(machine, 1)
    assert one == hardware_of(machine, needs_gpu=False)
    assert one.sockets == one.copy_nodes == ()
    assert one.even_rates == tuple(node.read_bytes_per_s for node in one.nodes)


def test_second_socket_is_taken_to_be_like_the_first_and_it_is_said() -> None:
    machine = load_machine(NAME)
    one, two = hardware(machine, 1), hardware(machine)
    assert two.cores == 2 * one.cores
    near = one.nodes[0].read_bytes_per_s
    across = one.nodes[1].read_bytes_per_s
    assert [node.read_bytes_per_s for node in two.nodes] == [near, near, 64e9]
    first, second = two.sockets
    assert [crossing.rates for crossing in first.crossings] == [{1: across}]
    assert [crossing.rates for crossing in second.crossings] == [{0: across, 2: 64e9}]
    assert [note for note in two.notes if "from the cores of node 1: taken" in note]
    assert not [note for note in one.notes if "node 1" in note]


def test_what_was_measured_goes_before_what_is_mirrored() -> None:
    rates = {(1, 0): 50e9, (1, 1): 200e9, (1, 2): 20e9}
    two = hardware(with_accesses(load_machine(NAME), rates))
    assert two.sockets[1].crossings[0].rates == {0: 50e9, 2: 20e9}
    assert two.nodes[1].read_bytes_per_s == 200e9
    assert not [note for note in two.notes if "cores of node 1: taken" in note]


def test_memory_beyond_the_link_is_no_faster_than_the_link() -> None:
    machine = with_accesses(load_machine(NAME), {(0, 1): 30e9})
    assert hardware(machine).sockets[1].crossings[0].rates == {0: 30e9, 2: 30e9}


def test_fewer_cores_read_less() -> None:
    machine = load_machine(NAME)
    nodes = list(machine.nodes)
    nodes[1] = replace(nodes[1], cpus=nodes[1].cpus[:26])
    two = hardware(replace(machine, nodes=tuple(nodes)))
    assert two.cores == 78
    assert two.nodes[1].read_bytes_per_s == pytest.approx(two.nodes[0].read_bytes_per_s / 2)


def test_copies_need_the_own_node_of_every_socket() -> None:
    machine = load_machine(NAME)
    two = hardware(machine)
    assert two.copy_nodes == (0, 1)
    assert two.without("rdram").copy_nodes == ()
    assert replace(two, copies=False).copy_nodes == ()
    with_gpu = hardware_of(load_machine("epyc9354-cxl-a"), sockets=2)
    assert with_gpu.sockets
    assert with_gpu.copy_nodes == ()  # what a GPU reads has one copy


@pytest.mark.parametrize(
    ("name", "sockets", "message"),
    [
        (NAME, 0, "0 sockets: at least 1"),
        (NAME, 3, "3 sockets: xeon8470-cxl-b has 2 with CPUs"),
        ("gh200", 2, "2 sockets: gh200 has 1 with CPUs"),
    ],
)
def test_sockets_that_are_not_there_are_refused(name: str, sockets: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hardware(load_machine(name), sockets)


def test_several_nodes_with_cpus_a_socket_are_refused() -> None:
    machine = load_machine(NAME)
    nodes = list(machine.nodes)
    nodes[1] = replace(nodes[1], socket=nodes[0].socket)
    nodes[2] = replace(nodes[2], socket=9, cpus=(200,))
    with pytest.raises(ConfigError, match=r"nodes 0, 1 of .*sub-NUMA clustering"):
        hardware(replace(machine, nodes=tuple(nodes)))
