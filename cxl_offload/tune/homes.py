"""Carries out a tuner's decisions by moving pages of existing tensors between tiers.

Training allocates its tensors once, so they can follow a decision only by moving. They move between
steps, one after the other and in parts, within a budget of bytes. Addresses and contents stay.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cxl_offload.errors import PlacementError
from cxl_offload.memory import Allocation, Policy, Session, Weighted, current_session
from cxl_offload.memory.placement import NOT_FAULTED_IN
from cxl_offload.memory.policy import DEFAULT_GRANULE_BYTES
from cxl_offload.tune.decision import Bounds
from cxl_offload.tune.tiers import check_tiers, tier_policy

if TYPE_CHECKING:
    import torch

_ROUNDING = 1e-9
_SAME_SHARE = 0.01
"""Shares that differ by less are the same, because whole stripes of a tensor round by as much."""

_FINE_GRANULE_BYTES = 64 << 10
_FINE_BELOW_BYTES = 60 * DEFAULT_GRANULE_BYTES
"""Granules in two cycles of the longest mix, 10 to 20. With as many, rounding to granules costs
less than 1 %."""

REFUSALS = (MemoryError, OSError, PlacementError)
"""Errors of a move that are nobody's mistake: a full node, or a refusal of the kernel or the
driver."""

_LOG = logging.getLogger("cxl_offload.tune")


@dataclass(frozen=True, slots=True)
class Moved:
    """What one call of :meth:`TunedHomes.advance` did.

    Attributes
    ----------
    tensors, nbytes
        Tensors that have arrived, and bytes that were moved. Pages that were in place already
        count.
    refused
        Why the rest stays where it is, or None if nothing was refused.
    """

    tensors: int = 0
    nbytes: int = 0
    refused: str | None = None


def tensors_of(session: Session, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of the tensors that lie in memory of a session."""
    return {
        name: one
        for name, one in tensors.items()
        if one.device.type == "cpu" and session.find(one.data_ptr()) is not None
    }


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
        check_tiers(near, far)
        self._near, self._far = tuple(near), tuple(far)
        self._session = session or current_session()
        for node in (*self._near, *self._far):
            self._session.free_bytes(node)  # a node that is not there is refused now
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
        self._done = 0  # bytes of the first that waits which have moved
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
        return sum(self._owners[address].nbytes for address in self._waiting) - self._done

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
        return tier_policy(self._near, self._far, share, granule_bytes=granule_bytes)

    def _policy_of(self, owner: Allocation, share: float) -> Policy:
        """The policy for one allocation.

        Large granules would round the share of a small tensor, so it gets small ones. If its pages
        are larger than those, it takes the rounded share.
        """
        fine = owner.nbytes < _FINE_BELOW_BYTES and owner.unit_bytes <= _FINE_GRANULE_BYTES
        granule_bytes = _FINE_GRANULE_BYTES if fine else DEFAULT_GRANULE_BYTES
        return self.policy(share, granule_bytes=granule_bytes)

    def _move_some(self, owner: Allocation, share: float) -> int:
        """Moves as much of an allocation as the credit allows; raises as :meth:`Session.move`.

        Parts are whole cycles of the mix, so that they add up to what one move would do. Pinned
        memory moves as a whole. The last move is of everything, and finds its pages in place
        already.

        Returns
        -------
        int
            Bytes; 0 where the credit is too small for any.
        """
        policy = self._policy_of(owner, share)
        left = owner.nbytes - self._done
        if left <= self._credit:
            self._session.move(owner, policy)
            return left
        if owner.pinned:
            return 0
        cycle = owner.unit_bytes
        if isinstance(policy, Weighted):
            cycle = math.lcm(cycle, policy.granule_bytes * sum(policy.weights.values()))
        nbytes = min(self._credit, left) // cycle * cycle
        if nbytes:
            self._session.move_part(owner, policy, offset=self._done, nbytes=nbytes)
        return nbytes

    def aim(self, share: float) -> None:
        """Sets the target, from 0 to 1; :meth:`advance` moves towards it."""
        if not -_ROUNDING <= share <= 1 + _ROUNDING:
            raise ValueError(f"a share of {share:g} on the far tier: from 0 to 1")
        share = min(1.0, max(0.0, share))
        if share == self._target:
            return
        if self._done:
            self._stop_here()
        self._target = share
        self._waiting = [
            at
            for at, now in self._far_share.items()
            if at not in self._fixed and abs(now - share) > _SAME_SHARE
        ]

    def _stop_here(self) -> None:
        """Keeps the moved part of the first waiting allocation where it is now.

        It does not ask for the pages, because the kernel may refuse that too, and the caller knows
        what has moved.
        """
        address = self._waiting[0]
        owner = self._owners[address]
        runs = owner.runs(0, owner.nbytes)
        far = sum(nbytes for _, nbytes, node in runs if node in self._far)
        self._far_share[address] = far / owner.nbytes
        self._done = 0

    def advance(self, most_bytes: int) -> Moved:
        """Moves further tensors, or parts of them, until the budget is used up.

        If the rest of a budget is smaller than the next part, it is saved up. A full node, or a
        refusal of the kernel, ends the moves to this target. Then everything stays where it is.
        """
        if not self._waiting or self._target is None:
            self._credit = 0
            return Moved()
        self._credit += int(min(most_bytes, sys.maxsize))
        tensors = nbytes = 0
        while self._waiting:
            owner = self._owners[self._waiting[0]]
            try:
                moved = self._move_some(owner, self._target)
            except ValueError as reason:  # smaller than a page, or pinned together with others
                _LOG.debug("tune: %d bytes stay where they are: %s", owner.nbytes, str(reason))
                self._fixed.add(self._waiting.pop(0))
                self._done = 0
                continue
            except REFUSALS as reason:
                self._give_up(node_full=isinstance(reason, MemoryError))
                return Moved(tensors, nbytes, str(reason))
            if not moved:
                break
            self._credit -= moved
            nbytes += moved
            self._done += moved
            if self._done == owner.nbytes:
                self._stop_here()
                self._waiting.pop(0)
                tensors += 1
        return Moved(tensors, nbytes)

    def _give_up(self, *, node_full: bool) -> None:
        """Ends the moves to this target. The room left on a full node is too small to use."""
        towards_far = (self._target or 0.0) > self._far_share[self._waiting[0]]
        self._stop_here()
        self._waiting.clear()
        tier = self._far if towards_far else self._near
        for node in tier if node_full else ():
            self._unusable[node] = self._session.free_bytes(node)
