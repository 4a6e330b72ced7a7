"""Switches: the notation, who shares which link, and what congestion does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxl_offload.errors import ConfigError
from cxl_offload.sim import Engines, Event, Fabric, SwitchLink, Trace, replay
from cxl_offload.topology import Access, DmaPath, Gpu, Link, Node, NodeKind

from .machines import GB, event, machine, speeds

SLOW = SwitchLink(bandwidth_bytes_per_s=10 * GB)


@pytest.mark.parametrize(
    ("text", "above"),
    [
        ("(1,(2,3));", {"1": (), "2": ("1",), "3": ("1",)}),
        ("(1,(2,3))", {"1": (), "2": ("1",), "3": ("1",)}),
        ("((1,2),(3));", {"1": ("1",), "2": ("1",), "3": ("2",)}),
        (" ( 1 , ( 2 , (3, g) b ) a ); ", {"1": (), "2": ("a",), "3": ("b", "a"), "g": ("b", "a")}),
        ("(((7)));", {"7": ("2", "1")}),
    ],
)  # fmt: skip
def test_tree_names_the_switches_above_every_endpoint(
    text: str, above: dict[str, tuple[str, ...]]
) -> None:
    assert Fabric.parse(text, every=SLOW).above == above


@pytest.mark.parametrize(
    "text",
    [
        *("", "1", "(1", "(1,)", "()", "(1,2));", "(1,2);x", "(1 2);", "(1,1);", "(a:1);"),
        *("(1,(2)a,(3)a);", "(1,(,2));"),
    ],
)
def test_text_that_is_no_tree_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="tree"):
        Fabric.parse(text, every=SLOW)


TREES = st.recursive(
    st.just("leaf"), lambda below: st.lists(below, min_size=1, max_size=3), max_leaves=8
)


@settings(max_examples=60, deadline=None)
@given(st.lists(TREES, min_size=1, max_size=3))
def test_every_tree_that_is_written_is_read_back(tree: list[Any]) -> None:
    names = itertools.count()
    depths: dict[str, int] = {}

    def write(part: Any, depth: int) -> str:
        if part == "leaf":
            name = f"n{next(names)}"
            depths[name] = depth
            return name
        return "(" + ",".join(write(child, depth + 1) for child in part) + ")"

    text = "(" + ",".join(write(part, 0) for part in tree) + ");"
    fabric = Fabric.parse(text, every=SLOW)
    assert {name: len(path) for name, path in fabric.above.items()} == depths


def test_links_are_found_by_name_and_missing_ones_are_named() -> None:
    fast = SwitchLink(bandwidth_bytes_per_s=64 * GB)
    fabric = Fabric.parse("(1,(2,(3)b)a);", every=SLOW, links={"b": fast})
    assert fabric.links == {"a": SLOW, "b": fast}
    with pytest.raises(ConfigError, match="no bandwidth of switch a"):
        Fabric.parse("(1,(2,(3)b)a);", links={"b": fast})
    with pytest.raises(ConfigError, match="no switch 'c'; its switches are a, b"):
        Fabric.parse("(1,(2,(3)b)a);", every=SLOW, links={"c": fast})


@pytest.mark.parametrize(
    "fields",
    [
        {"bandwidth_bytes_per_s": 0},
        {"bandwidth_bytes_per_s": float("nan")},
        {"bandwidth_bytes_per_s": 1, "latency_ns": -1},
        {"bandwidth_bytes_per_s": 1, "congestion_loss": 1.0},
    ],
)
def test_switch_with_impossible_numbers_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="switch with"):
        SwitchLink(**fields)


def two_cards(*, peer_to_peer: bool = False) -> Any:
    """DRAM (node 0) and two CXL cards of 20 GB/s (nodes 1, 2); a GPU of 10 GB/s each way."""
    return machine(
        nodes=tuple(
            Node(
                id=at,
                kind=NodeKind.CXL if at else NodeKind.DRAM,
                cpus=() if at else (0,),
                capacity_bytes=1 << 40,
            )
            for at in range(3)
        ),
        accesses=tuple(
            Access(0, at, 100.0 + 100 * bool(at), 100.0, rate * GB, rate * GB)
            for at, rate in enumerate((100, 20, 20))
        ),
        gpus=(
            Gpu(
                "gpu0",
                node=0,
                link=Link(10 * GB, 10 * GB, setup_s=0.0),
                peer_to_peer_cxl=peer_to_peer,
            ),
        ),
        dma_paths=(DmaPath("gpu0", 1, 10 * GB, 10 * GB), DmaPath("gpu0", 2, 10 * GB, 10 * GB)),
    )


def seconds(fabric: Fabric | None, *events: Event, **options: Any) -> float:
    peer = options.pop("peer_to_peer", False)
    return replay(Trace(events), two_cards(peer_to_peer=peer), fabric=fabric, **options).seconds


def test_cards_behind_one_switch_share_its_link_and_those_on_the_root_do_not() -> None:
    """Two readers of 20 GB on a card each: 1 s, or together 40 GB over 10 GB/s."""
    both = [event("cpu", {node: 20 * GB}, queue=str(node)) for node in (1, 2)]
    assert seconds(None, *both) == pytest.approx(1.0)
    assert seconds(Fabric.parse("(1,(2));", every=SLOW), *both) == pytest.approx(2.0)
    assert seconds(Fabric.parse("((1,2));", every=SLOW), *both) == pytest.approx(4.0)
    spread = event("cpu", {1: 20 * GB, 2: 20 * GB})
    assert seconds(Fabric.parse("((1,2));", every=SLOW), spread) == pytest.approx(4.0)


def test_reads_and_writes_cross_a_switch_in_opposite_directions() -> None:
    fabric = Fabric.parse("((1,2));", every=SLOW)
    read, write = event("cpu", {1: 20 * GB}, queue="a"), event("cpu", {}, {2: 20 * GB}, queue="b")
    assert seconds(fabric, read, write) == pytest.approx(2.0)


def test_narrowest_switch_on_the_way_bounds() -> None:
    wide, narrow = (
        SwitchLink(bandwidth_bytes_per_s=64 * GB),
        SwitchLink(bandwidth_bytes_per_s=4 * GB),
    )
    work = event("cpu", {2: 20 * GB})
    for inner, outer in ((wide, narrow), (narrow, wide)):
        fabric = Fabric.parse("(1,((2)inner)outer);", links={"inner": inner, "outer": outer})
        assert seconds(fabric, work) == pytest.approx(5.0)


def test_copy_to_a_gpu_behind_the_same_switch_goes_up_and_down_unless_peer_to_peer() -> None:
    """Up through the switch to the root and down again: a store by the CPU is in its way."""
    five = SwitchLink(bandwidth_bytes_per_s=5 * GB)
    fabric = Fabric.parse("(1,(2,gpu0));", every=five)
    copy = event("h2d", {2: 10 * GB}, queue="copy")
    assert seconds(fabric, copy) == pytest.approx(2.0)
    assert seconds(fabric, copy, peer_to_peer=True) == pytest.approx(1.0)
    back = event("d2h", {}, {2: 10 * GB}, queue="back")
    assert seconds(fabric, copy, back) == pytest.approx(4.0)
    assert seconds(fabric, copy, back, peer_to_peer=True) == pytest.approx(1.0)


def test_switches_on_the_way_lengthen_a_copys_setup_and_the_latency_of_loads() -> None:
    slow = SwitchLink(bandwidth_bytes_per_s=1000 * GB, latency_ns=1e9)
    fabric = Fabric.parse("(1,((2)));", every=slow)
    copy = event("h2d", {2: 10 * GB})
    assert seconds(fabric, copy) == pytest.approx(1.0 + 2.0)
    engines = Engines(lines_in_flight=1e9)
    load = event("cpu", {2: 64 * 10**9})
    assert seconds(fabric, load, engines=engines) == pytest.approx(64 / 20)
    far = 64e9 / (64 * 1e6) * (2.0 + 200e-9)
    engines = Engines(lines_in_flight=1e6)
    assert seconds(fabric, load, engines=engines) == pytest.approx(far)


def test_endpoint_that_the_machine_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match="no node and no GPU '9'"):
        seconds(Fabric.parse("(1,(9));", every=SLOW), event("cpu", {1: GB}))


def test_more_threads_first_help_then_hurt_behind_a_congested_switch() -> None:
    """Two cards of 20 GB/s behind 16 GB/s: a knee where lines in flight fill the switch."""
    congested = SwitchLink(bandwidth_bytes_per_s=16 * GB, congestion_loss=0.3)
    fabric = Fabric.parse("((1,2));", every=congested)
    work = event("cpu", {1: 8 * GB, 2: 8 * GB})
    knee = 16 * GB * 200e-9 / 64  # lines of 200 ns that make 16 GB/s
    times = [
        seconds(fabric, work, engines=Engines(lines_in_flight=factor * knee))
        for factor in (0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 4.0, 8.0)
    ]
    assert times[:3] == pytest.approx([4.0, 2.0, 1.0])
    assert times[2] < times[3] < times[4] < times[5]
    # Offered one and a half times, it loses 0.3 * (1 - 1/1.5) of what it carries.
    assert times[3] == pytest.approx(1 / 0.9)
    # The cards themselves deliver no more than 40 GB/s, whatever is asked.
    assert times[5:] == pytest.approx([1 / (1 - 0.3 * (1 - 16 / 40))] * 3)


def test_congestion_counts_what_all_events_offer_together() -> None:
    shares = [{0: 0.5, 1: 1.0}, {0: 0.5, 2: 1.0}, {0: 1.0, 3: 1.0}]
    # Together they offer 2: of the resource 1 - 0.4 * (1 - 1/2) = 0.8 is left.
    assert speeds(shares[:2], {0: 0.4}) == pytest.approx([1.0, 1.0])
    assert speeds(shares, {0: 0.4}) == pytest.approx([0.8 / 1.5, 0.8 / 1.5, 0.8 / 3])


def test_congestion_never_gives_more_than_without() -> None:
    calm = Fabric.parse("((1,2));", every=SLOW)
    rough = Fabric.parse(
        "((1,2));", every=SwitchLink(bandwidth_bytes_per_s=10 * GB, congestion_loss=0.5)
    )
    events = [
        event("cpu", {1: 5 * GB, 2: 7 * GB}, {2: GB}, queue="a"),
        event("h2d", {1: 5 * GB}, queue="b"),
        event("cpu", {2: 3 * GB}, queue="b"),
        event("d2h", {}, {1: 5 * GB}, queue="c"),
    ]
    for count in range(1, 5):
        assert seconds(rough, *events[:count]) >= seconds(calm, *events[:count]) * (1 - 1e-9)


def test_bandwidth_of_all_endpoints_is_capped_by_each_switch_on_the_way() -> None:
    rates = {"a": 10.0, "b": 20.0, "c": 30.0, "d": 30.0}
    tree = Fabric.parse("(a,(b,(c,d)));", every=SwitchLink(bandwidth_bytes_per_s=40.0))
    assert tree.bandwidth(rates) == 10 + min(40, 20 + min(40, 60))
    wide = Fabric.parse("(a,(b,(c,d)));", every=SwitchLink(bandwidth_bytes_per_s=1e9))
    assert wide.bandwidth(rates) == sum(rates.values())
    assert Fabric.parse("(a,b,c,d);").bandwidth(rates) == sum(rates.values())
