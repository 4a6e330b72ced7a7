"""Memory by kind where no policy names a node: as if the thread that asks had touched it first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from cxl_offload.memory import FirstTouch, Policy, Session
from cxl_offload.objects.kind_store import MemorySource, Part, TierStore
from cxl_offload.topology import load_machine

SHAPE = (4, 768)


def store_over(source: Any) -> TierStore:
    return TierStore(source, {"act": (Part("all", FirstTouch()),)}, pin=False)


def made_by(store: TierStore, rows: int = 1) -> torch.Tensor:
    return store.empty("act", 0, (rows, *SHAPE), torch.float16, pin=False)


@pytest.fixture
def session() -> Session:
    return Session.simulated(load_machine("epyc9354-cxl-a"))


def test_memory_of_first_touch_is_near_and_used_again(session: Session) -> None:
    store = store_over(MemorySource(session))
    addresses = set()
    for _ in range(20):
        tensor = made_by(store)
        near = session.kernel.local_node
        assert store.source.bytes_per_node(tensor.data_ptr(), tensor.nbytes) == {
            near: tensor.nbytes
        }
        addresses.add(tensor.data_ptr())
        del tensor
    assert len(addresses) == 1, "each was mapped and faulted in anew"


def test_what_the_near_node_has_no_room_for_lies_elsewhere() -> None:
    """As the system would do with memory that nobody bound."""
    near = Session.simulated(load_machine("epyc9354-cxl-a")).kernel.local_node
    session = Session.simulated(load_machine("epyc9354-cxl-a"), limits={near: 64 << 10})
    store = store_over(MemorySource(session))
    tensor = made_by(store, rows=64)
    assert tensor.nbytes > 64 << 10
    tensor.fill_(1)
    nodes = store.source.bytes_per_node(tensor.data_ptr(), tensor.nbytes)
    assert sum(nodes.values()) == tensor.nbytes
    assert nodes.get(near, 0) <= 64 << 10


@dataclass
class RefusingSource(MemorySource):
    """Over a session that refuses what it is asked of a node."""

    session: Session
    asked: list[Policy] = field(default_factory=list)

    def empty(self, shape: Any, dtype: Any, policy: Policy, *, pin: bool) -> torch.Tensor:
        self.asked.append(policy)
        if not isinstance(policy, FirstTouch):
            raise MemoryError("no node has room beside the reserve")
        return super().empty(shape, dtype, policy, pin=pin)


def test_what_the_session_holds_back_is_left_to_the_system(session: Session) -> None:
    source = RefusingSource(session)
    tensor = made_by(store_over(source))
    assert isinstance(source.asked[-1], FirstTouch)
    assert len(source.asked) == 2
    assert tensor.eq(0).all(), "every page was touched by this thread"
