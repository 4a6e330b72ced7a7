"""Bytes of every kind of tensor that live stores hold, over the whole process."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from cxl_offload.memory import Allocation, Session
from cxl_offload.memory.copies import copies_at


@dataclass(slots=True)
class LiveKind:
    """Bytes of one kind that are alive.

    Attributes
    ----------
    requested_bytes
        What was asked for.
    granted
        Node to bytes, as they were put there; bytes whose node nobody knows are left out.
    """

    requested_bytes: int = 0
    granted: dict[int, int] = field(default_factory=dict)

    def add(self, nbytes: int, nodes: Iterable[tuple[int, int]]) -> None:
        """Counts a tensor whose parts are (node, bytes)."""
        self.requested_bytes += nbytes
        for node, held in nodes:
            self.granted[node] = self.granted.get(node, 0) + held


class CountsKinds(Protocol):
    """A store that knows which of its tensors are alive."""

    def add_live_kinds(self, found: dict[str, LiveKind]) -> None:
        """Adds what is alive to the kinds that were found so far; asks no pages."""


def known_nodes(owner: Allocation | None, address: int, nbytes: int) -> list[tuple[int, int]]:
    """(node, bytes) of a range and its copies as its session put it, asking no pages: quick.

    Empty where nobody knows: memory of others, of first touch, or freed meanwhile.
    """
    offset = 0 if owner is None else address - owner.address
    if owner is None or offset + nbytes > owner.nbytes:
        return []
    blocks = copies_at(owner.address) or (owner,)
    return [(node, size) for each in blocks for _, size, node in each.runs(offset, nbytes)]


def nodes_in(session: Session, address: int, nbytes: int) -> list[tuple[int, int]]:
    """:func:`known_nodes` of a range of one session."""
    return known_nodes(session.find(address), address, nbytes)


_stores: weakref.WeakSet[CountsKinds] = weakref.WeakSet()
_lock = threading.Lock()


def count_kinds_of(store: CountsKinds) -> None:
    """The store is asked for its kinds as long as it lives."""
    with _lock:
        _stores.add(store)


def live_kinds() -> dict[str, LiveKind]:
    """Bytes by kind of all stores of this process, now."""
    with _lock:
        stores = list(_stores)
    found: dict[str, LiveKind] = {}
    for store in stores:
        store.add_live_kinds(found)
    return found


def _forget_in_child() -> None:
    global _stores, _lock
    _stores, _lock = weakref.WeakSet(), threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)
