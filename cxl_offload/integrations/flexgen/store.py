"""Host memory of one run: a tensor of a role goes where the role's policy says, and is counted."""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from cxl_offload.integrations.flexgen.places import Role
from cxl_offload.memory.policy import FirstTouch, Policy

__all__ = ["Part", "RoleUse", "TensorSource", "TierStore"]


class TensorSource(Protocol):
    """Where placed tensors come from."""

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, policy: Policy, *, pin: bool
    ) -> torch.Tensor:
        """An uninitialised CPU tensor, contiguous, whose pages follow ``policy``."""

    def bytes_per_node(self, address: int, nbytes: int) -> dict[int, int]:
        """Bytes of a range on every node, asked from the pages."""


@dataclass(frozen=True, slots=True)
class Part:
    """A named share of a role's bytes and its policy; a role that is not split has one part."""

    name: str
    policy: Policy


@dataclass(slots=True)
class RoleUse:
    """Bytes of one part of one role: what was asked for and where it is.

    Attributes
    ----------
    live_bytes, peak_bytes
        Requested bytes that are alive now, and the most there ever were.
    granted
        Node to bytes, read from the pages, at the moment of the peak.
    """

    live_bytes: int = 0
    peak_bytes: int = 0
    granted: dict[int, int] = field(default_factory=dict)
    _live: Counter[int] = field(default_factory=Counter)

    def add(self, nbytes: int, nodes: Mapping[int, int]) -> None:
        """Count a tensor that was allocated."""
        self.live_bytes += nbytes
        self._live.update(nodes)
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self.granted = {node: count for node, count in sorted(self._live.items()) if count}

    def remove(self, nbytes: int, nodes: Mapping[int, int]) -> None:
        """Count a tensor that is gone."""
        self.live_bytes -= nbytes
        self._live.subtract(nodes)


class TierStore:
    """Allocates for roles from a source and keeps count.

    Parameters
    ----------
    source
        Gives the memory.
    parts
        Every role's parts, in the order of the split.
    pin
        Whether to pin what the accelerator copies from and to (only of use with CUDA).
    """

    def __init__(
        self, source: TensorSource, parts: Mapping[Role, tuple[Part, ...]], *, pin: bool
    ) -> None:
        self.source = source
        self.parts = dict(parts)
        self._pin = pin
        self._lock = threading.RLock()  # a finalizer may run inside any of our own statements
        self._use: dict[tuple[Role, str], RoleUse] = {}

    def empty(
        self, role: Role, part: int, shape: tuple[int, ...], dtype: torch.dtype, *, pin: bool
    ) -> torch.Tensor:
        """A tensor for ``role``, in its ``part``-th part.

        Raises
        ------
        MemoryError
            A node is too full for it.
        """
        policy = self.parts[role][part].policy
        tensor = self.source.empty(shape, dtype, policy, pin=pin and self._pin)
        if isinstance(policy, FirstTouch):
            tensor.view(-1).view(torch.uint8).zero_()  # this thread is the first to touch
        return tensor

    def count(self, owner: object, role: Role, part: int, tensor: torch.Tensor) -> None:
        """Count ``tensor`` under ``role`` for as long as ``owner`` lives."""
        nbytes = math.prod(tensor.shape) * tensor.element_size()
        nodes = self.source.bytes_per_node(tensor.data_ptr(), nbytes)
        key = (role, self.parts[role][part].name)
        with self._lock:
            use = self._use.setdefault(key, RoleUse())
            use.add(nbytes, nodes)
        ending = weakref.finalize(owner, self._uncount, use, nbytes, nodes)
        ending.atexit = False

    def _uncount(self, use: RoleUse, nbytes: int, nodes: Mapping[int, int]) -> None:
        with self._lock:
            use.remove(nbytes, nodes)

    def use(self) -> dict[tuple[Role, str], RoleUse]:
        """Every role and part that ever held a tensor."""
        with self._lock:
            return dict(self._use)
