"""What may be planned with: tiers, limits and shares of a machine, and its links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.plan.hardware import NVME, hardware_of
from cxl_offload.plan.usable import GPU_USABLE
from cxl_offload.plan.what_if import with_gpu
from cxl_offload.topology import Access, DmaPath, Machine, load_machine

GIB = 1 << 30
MACHINE = load_machine("epyc9354-cxl-a")
WHOLE = hardware_of(MACHINE)


def test_nodes_are_those_of_the_tiers_in_their_order() -> None:
    tiers = {tier.name: tier.nodes for tier in MACHINE.tiers}
    assert [node.tier for node in WHOLE.nodes] == ["ldram", "rdram", "cxl"]
    assert [node.node for node in WHOLE.nodes] == [
        *tiers["ldram"], *tiers["rdram"], *tiers["cxl"]
    ]  # fmt: skip
    reads = [node.read_bytes_per_s for node in WHOLE.nodes]
    assert reads == sorted(reads, reverse=True)
    assert WHOLE.has_gpu


def test_usable_bytes_are_a_share_of_the_capacity_and_a_limit_goes_before() -> None:
    half = hardware_of(MACHINE, host_usable=0.5, gpu_usable=0.25)
    for whole, node in zip(WHOLE.nodes, half.nodes, strict=True):
        capacity = MACHINE.node(node.node).capacity_bytes
        assert 0.45 * capacity < node.usable_bytes <= 0.5 * capacity < whole.usable_bytes
    assert half.gpu_usable_bytes == 0.25 * half.gpu_memory_bytes
    assert WHOLE.gpu_usable_bytes == GPU_USABLE * WHOLE.gpu_memory_bytes
    limited = hardware_of(MACHINE, limits={"cxl": 7 * GIB, NVME: 3 * GIB})
    assert limited.nodes[2].usable_bytes == 7 * GIB
    assert limited.nodes[:2] == WHOLE.nodes[:2]
    assert limited.drive_usable_bytes == 3 * GIB


def test_tiers_that_are_left_out_are_gone() -> None:
    assert hardware_of(MACHINE, tiers=("ldram", "cxl")).names == ("ldram", "cxl")
    assert hardware_of(MACHINE, tiers=("ldram", NVME)).drive_usable_bytes > 0
    assert hardware_of(MACHINE, tiers=("ldram",)).drive_usable_bytes == 0
    assert WHOLE.without("rdram").names == ("ldram", "cxl")
    assert WHOLE.without(NVME).rooms().keys() == {*WHOLE.names, "gpu"}
    assert WHOLE.rooms().keys() == {*WHOLE.names, "gpu", NVME}


def test_bytes_in_the_order_of_nodes_are_told_by_their_numbers() -> None:
    ids = [node.node for node in WHOLE.nodes]
    assert WHOLE.node_bytes((5, 6, 7)) == dict(zip(ids, (5, 6, 7), strict=True))
    with pytest.raises(ValueError, match="zip"):
        WHOLE.node_bytes((5, 6))


@pytest.mark.parametrize("gpus", [1, 2, 64])
def test_gpus_have_a_link_each_and_share_what_a_node_gives(gpus: int) -> None:
    found = WHOLE.of_gpus(gpus)
    assert found.link_bytes_per_s == gpus * WHOLE.link_bytes_per_s
    for one, node in zip(WHOLE.nodes, found.nodes, strict=True):
        most = max(one.read_bytes_per_s, one.copy_bytes_per_s)
        assert node.copy_bytes_per_s == pytest.approx(min(gpus * one.copy_bytes_per_s, most))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"tiers": ("hbm",)}, "tier hbm: epyc9354-cxl-a has no such tier"),
        ({"tiers": (NVME,)}, "no host tier with memory to plan for"),
        ({"limits": {"pmem": GIB}}, "limit of pmem: epyc9354-cxl-a offers ldram, rdram, cxl"),
        ({"limits": {"cxl": 1 << 50}}, "limit of cxl: 1.049e[+]06 GiB, but it has"),
        ({"host_usable": 0}, "usable share of host memory 0"),
        ({"gpu_usable": 1.5}, "usable share of GPU memory 1.5"),
    ],
)
def test_what_the_machine_cannot_give_is_refused(asked: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        hardware_of(MACHINE, **asked)  # type: ignore[arg-type]


def test_machine_without_a_gpu_is_planned_for_where_none_is_needed() -> None:
    machine = load_machine("spr-2")
    with pytest.raises(ConfigError, match="has no GPU"):
        hardware_of(machine)
    found = hardware_of(machine, needs_gpu=False)
    assert (found.has_gpu, found.gpu_usable_bytes) == (False, 0.0)
    assert "CPUs compute: spr-2 has no GPU; --gpu h100 plans as if it had one" in found.notes


def test_gpus_that_are_left_out_are_not_said_to_be_missing() -> None:
    without = with_gpu(MACHINE, "none")
    found = hardware_of(without, needs_gpu=False)
    assert "CPUs compute: GPUs are left out (--gpu none)" in found.notes
    with pytest.raises(ConfigError, match=r"left out \(--gpu none\); leave that out, or name"):
        hardware_of(without)
    assert hardware_of(with_gpu(without, "h100")).has_gpu


def two_sockets_with_a_gpu_each(*, paths: bool = True) -> Machine:
    """System A with a second GPU on the other socket, and copies as a profile measures them."""
    first = MACHINE.gpus[0]
    assert first.link is not None
    link = replace(first.link, h2d_bandwidth_bytes_per_s=12e9)
    second = replace(first, name="second", node=1, link=link)
    rates = {first.name: (24e9, 15e9, 10e9), "second": (14e9, 23e9, 8e9)}
    return replace(
        MACHINE,
        gpus=(first, second),
        dma_paths=tuple(
            DmaPath(gpu, node, rate, rate)
            for gpu, each in rates.items()
            for node, rate in enumerate(each)
            if paths or gpu == first.name
        ),
        accesses=(
            *MACHINE.accesses,
            Access(1, 1, None, None, 380e9),
            Access(1, 0, None, None, 9e9),
        ),
    )


def test_every_gpu_copies_over_its_own_link_from_its_own_socket() -> None:
    one = hardware_of(two_sockets_with_a_gpu_each())
    two, three = one.of_gpus(2), one.of_gpus(3)
    assert one.link_bytes_per_s == 25e9
    assert (two.link_bytes_per_s, three.link_bytes_per_s) == (37e9, 62e9)
    rates = {node.node: node.copy_bytes_per_s for node in two.nodes}
    assert rates == {0: 38e9, 1: 38e9, 2: 18e9}
    assert {node.node: node.copy_bytes_per_s for node in three.nodes} == {0: 62e9, 1: 53e9, 2: 28e9}
    assert {node.node: node.copy_bytes_per_s for node in one.nodes} == {0: 24e9, 1: 15e9, 2: 10e9}


def test_gpu_without_measured_copies_gets_what_cpus_of_its_socket_read() -> None:
    two = hardware_of(two_sockets_with_a_gpu_each(paths=False)).of_gpus(2)
    rates = {node.node: node.copy_bytes_per_s for node in two.nodes}
    # nobody printed what socket 1 reads of the card: as of the first GPU
    assert rates == {0: 33e9, 1: 380e9, 2: 20e9}


def test_second_gpu_of_a_machine_changes_no_plan_for_one() -> None:
    machine = two_sockets_with_a_gpu_each()
    alone = hardware_of(replace(machine, gpus=machine.gpus[:1], dma_paths=machine.dma_paths[:3]))
    both = hardware_of(machine)
    assert (both.link_bytes_per_s, both.gpu) == (alone.link_bytes_per_s, alone.gpu)
    assert [n.copy_bytes_per_s for n in both.nodes] == [n.copy_bytes_per_s for n in alone.nodes]
    assert both.of_gpus(1) == both
