"""Carries a tuner's decisions out: the pages of tensors that are already there change tiers.

What training allocates once can follow a decision only by moving. Tensors move one after the other,
between steps, within a budget of bytes; their addresses and contents stay.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cxl_offload.memory import Bind, Policy, Session, Weighted, current_session
from cxl_offload.memory.placement import NOT_FAULTED_IN
from cxl_offload.memory.policy import DEFAULT_GRANULE_BYTES
from cxl_offload.tune.decision import Bounds, weights_of_share

if TYPE_CHECKING:
    import torch

__all__ = ["Moved", "TunedHomes"]

_SAME_SHARE = 0.01
"""Shares closer than this are the same: whole stripes of a tensor round that much."""

_FINE_GRANULE_BYTES = 64 << 10
_FINE_BELOW_BYTES = 60 * DEFAULT_GRANULE_BYTES
"""Two cycles of the longest mix, 10 to 20: from there on, rounding to granules costs below 1 %."""

_LOG = logging.getLogger("cxl_offload.tune")


@dataclass(frozen=True, slots=True)
class Moved:
    """What one call of :meth:`TunedHomes.advance` did.

    Attributes
    ----------
    tensors, nbytes
        Moved, and their bytes: all of a tensor counts, also the pages that stayed.
    refused
        Why the rest stays where it is; None where nothing was refused.
    """

    tensors: int = 0
    nbytes: int = 0
    refused: str | None = None


class TunedHomes:
    """Tensors whose share on the far tier follows a tuner.

    Parameters
    ----------
    tensors
        Name to CPU tensor of this package. Several views of one allocation count once, and move
        together. The tensors are kept alive.
    near, far
        Nodes of the two tiers. Bytes of a tier spread evenly over its nodes.
    session
        The session that the tensors are in; None means the active one.

    Raises
    ------
    ValueError
        No node, a node in both tiers, or a tensor that is not this package's.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        near: Sequence[int],
        far: Sequence[int],
        session: Session | None = None,
    ) -> None:
        self._near, self._far = tuple(near), tuple(far)
        if not near or not far or set(near) & set(far):
            raise ValueError(
                f"near nodes {list(near)}, far nodes {list(far)}: need some of each, none in both"
            )
        self._session = session or current_session()
        self._kept = tuple(tensors.values())
        self._owners = {}
        for name, tensor in tensors.items():
            owner = self._session.find(tensor.data_ptr())
            if owner is None:
                raise ValueError(
                    f"tune: tensor {name!r} is not in memory of this session; "
                    "make it with cxl_offload.from_tensor"
                )
            self._owners[owner.address] = owner
        # Pages are asked once, since that takes long for many gibibytes; moves keep the books.
        self._far_share = {
            address: self._ask(address, owner.nbytes) for address, owner in self._owners.items()
        }
        self._fixed: set[int] = set()
        self._waiting: list[int] = []
        self._target: float | None = None
        self._credit = 0
        self._unusable = dict.fromkeys((*self._near, *self._far), 0)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(owner.nbytes for owner in self._owners.values())

    @property
    def pending_bytes(self) -> int:
        """Bytes of the tensors that have not moved to the target yet."""
        return sum(self._owners[address].nbytes for address in self._waiting)

    def _ask(self, address: int, nbytes: int) -> float:
        """Share of a range's bytes on the far tier, asked from its pages."""
        found = self._session.bytes_per_node(address, nbytes)
        there = sum(count for node, count in found.items() if node != NOT_FAULTED_IN)
        return sum(found.get(node, 0) for node in self._far) / there if there else 0.0

    def granted(self) -> float:
        """Share of the bytes on the far tier now, asked from all pages: slow for many of them."""
        held = self.nbytes
        far = sum(
            self._ask(address, owner.nbytes) * owner.nbytes
            for address, owner in self._owners.items()
        )
        return far / held if held else 0.0

    @property
    def share(self) -> float:
        """Share of the bytes on the far tier, from the books."""
        held = self.nbytes
        far = sum(self._far_share[at] * owner.nbytes for at, owner in self._owners.items())
        return min(1.0, far / held) if held else 0.0

    def _room(self, nodes: tuple[int, ...]) -> int:
        """Free bytes of a tier beyond those that the kernel or the session has refused to give."""
        free = {node: self._session.free_bytes(node) for node in nodes}
        return sum(max(0, count - self._unusable[node]) for node, count in free.items())

    def bounds(self) -> Bounds:
        """Shares for which both tiers have room now."""
        held, share = self.nbytes, self.share
        if not held:
            return Bounds(share, share)
        room_near, room_far = self._room(self._near), self._room(self._far)
        return Bounds(max(0.0, share - room_near / held), min(1.0, share + room_far / held))

    def policy(self, share: float, *, granule_bytes: int = DEFAULT_GRANULE_BYTES) -> Policy:
        """The policy that puts ``share`` of a tensor's bytes on the far tier."""
        near, far = weights_of_share(share)
        weights = {node: near * len(self._far) for node in self._near if near}
        weights |= {node: far * len(self._near) for node in self._far if far}
        if len(weights) == 1:
            return Bind(tuple(weights))
        return Weighted(weights, granule_bytes=granule_bytes)

    def _move(self, address: int, share: float) -> None:
        """Moves one allocation; raises as :meth:`Session.move`.

        Large granules would round the share of a small tensor. Where its pages are larger than
        small granules, it has to take the rounded share.
        """
        owner = self._owners[address]
        if owner.nbytes < _FINE_BELOW_BYTES:
            with contextlib.suppress(ValueError):
                self._session.move(owner, self.policy(share, granule_bytes=_FINE_GRANULE_BYTES))
                return
        self._session.move(owner, self.policy(share))

    def aim(self, share: float) -> None:
        """Sets the target; :meth:`advance` moves towards it."""
        if share != self._target:
            self._target = share
            self._waiting = [
                at
                for at, now in self._far_share.items()
                if at not in self._fixed and abs(now - share) > _SAME_SHARE
            ]

    def advance(self, most_bytes: int) -> Moved:
        """Moves further tensors, whole ones, until the budget is used up.

        A budget smaller than the next tensor is saved up until it suffices. A full node ends the
        moves to this target: what has moved stays, the rest stays where it is.
        """
        if not self._waiting or self._target is None:
            self._credit = 0
            return Moved()
        self._credit += most_bytes
        tensors = nbytes = 0
        while self._waiting and self._owners[self._waiting[0]].nbytes <= self._credit:
            address = self._waiting.pop(0)
            owner = self._owners[address]
            try:
                self._move(address, self._target)
            except ValueError as reason:  # smaller than a page, or pinned together with others
                _LOG.debug("tune: %d bytes stay where they are: %s", owner.nbytes, reason)
                self._fixed.add(address)
                continue
            except MemoryError as reason:
                self._waiting.clear()
                towards = self._far if self._target > self._far_share[address] else self._near
                for node in towards:
                    self._unusable[node] = self._session.free_bytes(node)
                return Moved(tensors, nbytes, str(reason))
            self._far_share[address] = self._ask(address, owner.nbytes)
            tensors += 1
            nbytes += owner.nbytes
            self._credit -= owner.nbytes
        return Moved(tensors, nbytes)
