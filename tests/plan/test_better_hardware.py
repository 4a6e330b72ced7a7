"""Hardware that stands for many that are a little better in one place each."""

from __future__ import annotations

from dataclasses import replace

from cxl_offload.plan.better_hardware import better_everywhere, gains_of
from cxl_offload.plan.hardware import Hardware, hardware_of
from cxl_offload.plan.prices import resources
from cxl_offload.topology import load_machine


def system_a() -> Hardware:
    return hardware_of(load_machine("epyc9354-cxl-a"))


def test_what_stands_for_the_prices_of_all_nodes_is_worse_than_none_of_them() -> None:
    hardware, stands = system_a(), {}
    for resource in resources(hardware):
        shared = better_everywhere(hardware, resource.more)
        if shared is not None:
            stands.setdefault(resource.what.split(" ", 1)[1], set()).add(shared.more)
            assert gains_of(resource.more, shared.hardware) is not None
    assert {what: len(mores) for what, mores in stands.items()} == {
        "capacity": 1,
        "bandwidth (CPU)": 1,
        "bandwidth (GPU copies)": 1,
    }


def test_nothing_stands_for_what_is_one_of_a_kind_or_worse() -> None:
    hardware = system_a()
    faster = replace(hardware, link_bytes_per_s=2 * hardware.link_bytes_per_s)
    slower = replace(hardware, link_bytes_per_s=hardware.link_bytes_per_s / 2)
    assert better_everywhere(hardware, faster) is None
    assert better_everywhere(hardware, slower) is None
    assert better_everywhere(hardware, replace(faster, cores=1)) is None
    assert better_everywhere(hardware, hardware.without("cxl")) is None


def test_sums_of_the_faster_node_and_the_rest_are_kept_apart() -> None:
    hardware = system_a()
    nodes = (replace(hardware.nodes[0], usable_bytes=1e12), *hardware.nodes[1:])
    shared = better_everywhere(hardware, replace(hardware, nodes=nodes, drive_usable_bytes=1e13))
    assert shared is not None
    more = 1e12 - hardware.nodes[0].usable_bytes
    for old, new in zip(hardware.nodes, shared.hardware.nodes, strict=True):
        assert new.usable_bytes >= old.usable_bytes + more * (1 - 1e-12)
        assert new.read_bytes_per_s == old.read_bytes_per_s
    assert shared.hardware.drive_usable_bytes == 1e13
