"""Prices are what the executor plans with one unit more of a resource."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.prices import prices, resources

from .toy_executor import GIB, Toy, has

FIELDS = ("usable_bytes", "read_bytes_per_s", "copy_bytes_per_s")


def linear(hardware: Hardware) -> float:
    """2 tokens/s a GiB of the first node, 3 a GB/s that CPUs read of it, 5 a GB/s of the link."""
    first = hardware.nodes[0]
    rate = 2 * first.usable_bytes / GIB + 3 * first.read_bytes_per_s / 1e9
    return rate + 5 * hardware.link_bytes_per_s / 1e9 - 4 * hardware.drive_read_bytes_per_s / 1e9


def test_price_is_the_gain_of_one_unit_and_never_below_nothing() -> None:
    toy = Toy(linear)
    found = toy.search(toy.hardware())
    assert found is not None
    gains = {each.what: each.gain_tokens_per_s for each in prices(toy, found)}
    name = found.hardware.nodes[0].name
    expected = {f"{name} capacity": 2.0, f"{name} bandwidth (CPU)": 3.0, "link": 5.0}
    assert {what: gain for what, gain in gains.items() if gain} == pytest.approx(expected)
    assert gains["nvme reads"] == 0.0, "slower with more is no loss to pay for"
    assert all(like is found for like in toy.like[1:]), "every search begins from the plan"


def test_unit_with_which_nothing_is_found_brings_nothing() -> None:
    toy = Toy(lambda hw: 1.0 if hw == toy.hardware() else None)
    found = toy.search(toy.hardware())
    assert found is not None
    assert {each.gain_tokens_per_s for each in prices(toy, found)} == {0.0}


def test_every_room_and_known_rate_is_a_resource_once() -> None:
    hardware = Toy(linear).hardware()
    every = [(each.what, each.unit) for each in resources(hardware)]
    assert len(every) == len(set(every))
    for node in hardware.nodes:
        assert (f"{node.name} capacity", "GiB") in every
        assert (f"{node.name} bandwidth (CPU)", "GB/s") in every
    assert {("GPU memory", "GiB"), ("link", "GB/s"), ("nvme capacity", "GiB")} < set(every)
    for each in resources(hardware):
        assert each.more != hardware


def test_what_does_not_count_is_no_resource() -> None:
    hardware = Toy(linear).hardware()
    gpu_only = [each.what for each in resources(hardware, computes_on_cpu=False)]
    assert not any("(CPU)" in what for what in gpu_only)
    without = hardware.without("nvme")
    assert not has(without, "nvme")
    assert not any("nvme" in each.what for each in resources(without))
    unbound = replace(hardware.nodes[0], copy_bytes_per_s=float("inf"))
    nodes = (unbound, *hardware.nodes[1:])
    names = [each.what for each in resources(replace(hardware, nodes=nodes))]
    assert f"{unbound.name} bandwidth (GPU copies)" not in names
    assert f"{hardware.nodes[1].name} bandwidth (GPU copies)" in names


def test_what_brings_nothing_on_all_nodes_is_asked_once() -> None:
    """Of three nodes each: room brings nothing, CPUs' reads of the first bring something."""
    toy = Toy(lambda hardware: 3 * hardware.nodes[0].read_bytes_per_s / 1e9)
    found = toy.search(toy.hardware())
    assert found is not None
    assert len(found.hardware.nodes) == 3
    every = list(resources(found.hardware))
    asked = {name: sum(each.of_nodes == name for each in every) for name in FIELDS}
    assert asked == dict.fromkeys(FIELDS, 3)

    gains = {each.what: each.gain_tokens_per_s for each in prices(toy, found)}

    first = found.hardware.nodes[0].name
    assert {what for what, gain in gains.items() if gain} == {f"{first} bandwidth (CPU)"}
    assert gains.keys() == {each.what for each in every}
    others = sum(not each.of_nodes for each in every)
    assert len(toy.seen) - 1 == others + 1 + 1 + (1 + 3), "room and copies once, reads for each too"
    for name in FIELDS:
        together = [
            all(getattr(a, name) > getattr(b, name) for a, b in zip(seen, known, strict=True))
            for seen, known in ((each.nodes, found.hardware.nodes) for each in toy.seen)
        ]
        assert sum(together) == 1
