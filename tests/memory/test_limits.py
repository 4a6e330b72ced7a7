"""What a session may hold, said by tier or by node, as the command line says it."""

from __future__ import annotations

from typing import Any

import pytest

from cxl_offload.memory import Bind, Session
from cxl_offload.memory.limits import RoomLimits
from cxl_offload.topology import load_machine

from .machines import MIB


def test_limit_of_a_tier_or_a_node_is_kept_in_bytes_or_as_a_text() -> None:
    machine = load_machine("epyc9354-cxl-a")
    (node,) = machine.tier("cxl").nodes
    said: tuple[RoomLimits, ...] = ({"cxl": "8MiB"}, {node: "8MiB"}, {"cxl": 8 * MIB})
    for limits in said:
        session = Session.simulated(machine, limits=limits)
        assert session.allocate(8 * MIB, Bind((node,))).nbytes == 8 * MIB
        with pytest.raises(MemoryError, match=rf"node {node} has .* of its set capacity left"):
            session.allocate(9 * MIB, Bind((node,)))


@pytest.mark.parametrize(
    ("limits", "wrong"),
    [
        ({"clx": "1GiB"}, "has no tier 'clx'"),
        ({9: MIB}, "has no node 9"),
        ({"cxl": "much"}, "limit of cxl: "),
        ({0: -1}, "limit of 0: a size is from 0"),
        ({"ldram": MIB, 0: MIB}, "limit of 0: node 0 has a limit already"),
        ({"nvme": MIB}, "limit of nvme: its nodes are none, and a session counts each node"),
    ],
)
def test_limit_that_cannot_be_kept_is_refused(limits: RoomLimits, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Session.simulated(load_machine("epyc9354-cxl-a"), limits=limits)


def test_capacities_warn_and_are_limits() -> None:
    old: Any = {"capacities": {0: MIB}}
    with pytest.warns(DeprecationWarning, match="capacities= is now limits="):
        session = Session.simulated(load_machine("epyc9354-cxl-a"), **old)
    with pytest.raises(MemoryError):
        session.allocate(2 * MIB, Bind((0,)))
