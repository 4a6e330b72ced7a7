"""Small simulated machines for the memory tests."""

from __future__ import annotations

import gc
import time

from cxl_offload.memory import Session
from cxl_offload.topology import Machine, Node, NodeKind, Tier

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

DISTANCES = {0: {0: 10, 1: 21, 2: 24}, 1: {0: 21, 1: 10, 2: 34}, 2: {0: 24, 1: 34, 2: 10}}


def simulated_machine(capacities: tuple[int, int, int] = (8 * GIB, 8 * GIB, 4 * GIB)) -> Machine:
    """Two sockets and a CPU-less CXL node nearer to the first."""
    near, far, cxl = capacities
    return Machine(
        name="two-sockets-and-cxl",
        nodes=(
            Node(id=0, kind=NodeKind.DRAM, cpus=(0, 1), capacity_bytes=near),
            Node(id=1, kind=NodeKind.DRAM, cpus=(2, 3), capacity_bytes=far),
            Node(id=2, kind=NodeKind.CXL, cpus=(), capacity_bytes=cxl),
        ),
        distances=DISTANCES,
        tiers=(Tier("ldram", (0,)), Tier("rdram", (1,)), Tier("cxl", (2,))),
        simulated=True,
    )


def simulated_memory(
    capacities: tuple[int, int, int] = (8 * GIB, 8 * GIB, 4 * GIB),
) -> Session:
    return Session.simulated(simulated_machine(capacities))


def wait_until_all_is_back(session: Session, seconds: float = 60) -> None:
    """Fails where a session still holds bytes at the end.

    The thread that copies activations ahead, and autograd's own, may drop the last tensor a moment
    after the backward pass.
    """
    gc.collect()
    end = time.monotonic() + seconds
    while session.stats().asked_bytes.current and time.monotonic() < end:
        time.sleep(0.01)
    assert session.stats().asked_bytes.current == 0
