"""Policies as users write them: text, mappings and objects mean the same, nonsense is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxl_offload import load_machine
from cxl_offload.memory import (
    Bind,
    FirstTouch,
    Interleave,
    Policy,
    Preferred,
    Weighted,
    as_policy,
    parse_policy,
)

from .machines import simulated_machine

NODES = st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True).map(tuple)
GRANULES = st.sampled_from([4096, 65536, 2 << 20, 12288, 1 << 30])
POLICIES = st.one_of(
    st.just(FirstTouch()),
    NODES.map(Bind),
    NODES.map(Preferred),
    st.builds(lambda n, g: Interleave(n, granule_bytes=g), NODES, GRANULES),
    st.builds(
        lambda n, g, w: Weighted(dict.fromkeys(n, w), granule_bytes=g),
        NODES,
        GRANULES,
        st.integers(1, 255),
    ),
)


@given(POLICIES)
def test_text_of_policy_parses_back(policy: Policy) -> None:
    assert parse_policy(str(policy)) == policy


def test_tier_names_stand_for_their_nodes() -> None:
    machine = simulated_machine()
    assert parse_policy("cxl", machine) == Bind((2,))
    assert parse_policy("preferred:ldram,cxl", machine) == Preferred((0, 2))
    assert parse_policy("weighted:ldram=3,cxl=1@64KiB", machine) == Weighted(
        {0: 3, 2: 1}, granule_bytes=65536
    )
    assert parse_policy("interleave:0,cxl", machine) == Interleave((0, 2))


def test_mapping_of_one_node_binds() -> None:
    assert as_policy({2: 7}) == Bind((2,))
    assert as_policy({0: 2, 2: 1}) == Weighted({0: 2, 2: 1})


@pytest.mark.parametrize(
    "policy",
    [
        {0: 0},
        {0: -1, 1: 1},
        {0: 256, 1: 1},
        {0: 1.5, 1: 1},
        {0: math.nan, 1: 1},
        {0: True, 1: 1},
        {-1: 1, 0: 1},
        {},
    ],
    ids=str,
)
def test_weights_and_nodes_that_mean_nothing_are_refused(policy: dict[int, int]) -> None:
    with pytest.raises(ValueError, match=r"weight|node"):
        as_policy(policy)


REASON = (
    r"neither a node|not a policy|twice|no weight|not an integer|two weights|outside"
    r"|granule|quantity|a second time"
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "bind",
        "bind:",
        "bind:moon",
        "bind:0,0",
        "bind:-1",
        "bind:0@64KiB",
        "weighted:0,1=2",
        "weighted:0,0",
        "weighted:0=x",
        "weighted:0=nan",
        "weighted:0=1,0=2",
        "weighted:0=0",
        "interleave:0@64",
        "interleave:0@-1KiB",
        "moon",
        "everywhere:0",
    ],
)
def test_text_that_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=REASON):
        parse_policy(text, simulated_machine())


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="no policy"):
        as_policy(3)  # type: ignore[arg-type]


def test_weights_that_are_not_given_suit_the_bandwidths_of_the_nodes() -> None:
    machine = load_machine("epyc9354-cxl-a")  # 392, 225 and 38.4 GB/s
    assert parse_policy("weighted:ldram,cxl", machine) == Weighted({0: 11, 2: 1})
    found = parse_policy("weighted:0,1@64KiB", machine)
    assert found == Weighted({0: 2, 1: 1}, granule_bytes=1 << 16)
    with pytest.raises(ValueError, match=r"by bandwidth the weights of 0, 1, 2 are \(8, 4, 0\)"):
        parse_policy("weighted:0,1,2", machine)
    with pytest.raises(ValueError, match="the bandwidth of 0 is not known here; give weights"):
        parse_policy("weighted:0,1", replace(machine, accesses=()))
    with pytest.raises(ValueError, match="gives no weight; write NODE=WEIGHT"):
        parse_policy("weighted:0,1")  # of no machine
