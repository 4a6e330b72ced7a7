"""Chooses by their use which items live on the near tier: experts, embedding rows, sequences.

Uses are counted, and old ones count less and less, so that an item that was used often an hour ago
does not stay. An item moves near only if it is used clearly more than the one it replaces. So two
items of about equal use do not trade places for ever. A budget limits how many move at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cxl_offload.errors import ConfigError
from cxl_offload.tune.state_file import DAMAGED


@dataclass(frozen=True, slots=True)
class MostUsedRule:
    """When an item moves.

    Attributes
    ----------
    half_life
        Rounds after which a use counts half as much.
    margin
        An item moves near when its uses exceed this many times those of the item it replaces.
    repay
        Within so many rounds, the near tier must have saved the bytes that the two moves cost.
    traffic
        Most bytes that may move, as a fraction of the bytes that are asked for; see
        :class:`~cxl_offload.tune.MostUsedParts`.
    """

    half_life: float = 256.0
    margin: float = 1.1
    repay: float = 128.0
    traffic: float = 0.01

    def __post_init__(self) -> None:
        sound = self.half_life > 0 and self.margin >= 1 and self.repay > 0 and self.traffic > 0
        if not sound:
            raise ValueError(f"{self}: need half_life, repay and traffic > 0, margin >= 1")


@dataclass(frozen=True, slots=True)
class Swap:
    """One item to the near tier and one back; ``far`` is -1 while the near tier has room."""

    near: int
    far: int


class MostUsedItems:
    """Items of equal size, a number of which fit the near tier.

    Parameters
    ----------
    items
        How many there are.
    room
        How many the near tier holds.
    near
        Those that lie there now; the first ``room`` by default.
    """

    def __init__(
        self,
        items: int,
        room: int,
        *,
        near: Sequence[int] | None = None,
        rule: MostUsedRule = MostUsedRule(),
    ) -> None:
        if items < 1 or not 0 <= room <= items:
            raise ValueError(
                f"room for {room} of {items} items: need 0 <= room <= items, items >= 1"
            )
        chosen = list(range(room)) if near is None else sorted(set(near))
        if len(chosen) > room or (chosen and not 0 <= chosen[0] <= chosen[-1] < items):
            raise ValueError(
                f"{len(chosen)} items are near and there is room for {room} of {items}"
            )
        self._rule = rule
        self._room = room
        self._uses = np.zeros(items)
        self._near = np.zeros(items, dtype=bool)
        self._near[chosen] = True
        self._rounds = 0.0

    @property
    def near(self) -> tuple[int, ...]:
        """Items that are to lie on the near tier."""
        return tuple(int(item) for item in np.flatnonzero(self._near))

    def undo(self, swap: Swap) -> None:
        """Takes back a swap that :meth:`swaps` gave, because a node was full."""
        self._near[swap.near] = False
        if swap.far >= 0:
            self._near[swap.far] = True

    def leave(self, item: int) -> None:
        """Notes that an item is not near any more, for another reason than a swap."""
        self._near[item] = False

    def saved(self) -> dict[str, Any]:
        """What :meth:`restore` needs, as JSON."""
        return {"uses": self._uses.tolist(), "rounds": self._rounds}

    def restore(self, saved: dict[str, Any]) -> None:
        """Goes on with the uses that were counted when :meth:`saved` was called.

        Which items are near is not restored: memory is new after a restart.

        Raises
        ------
        ConfigError
            The state is damaged, or of another number of items.
        """
        try:
            uses = np.array([float(one) for one in saved["uses"]])
            rounds = float(saved["rounds"])
            sound = np.isfinite(uses).all() and (uses >= 0).all() and 0 <= rounds < np.inf
            if uses.shape != self._uses.shape or not sound:
                raise ValueError("uses")
        except DAMAGED as problem:
            raise ConfigError(
                f"the saved state is not that of {len(self._uses)} items"
            ) from problem
        self._uses, self._rounds = uses, rounds

    def note(self, uses: ArrayLike) -> None:
        """One round: how often each item was used.

        Parameters
        ----------
        uses
            float or int ``(items,)``, finite and not negative.
        """
        counts: NDArray[np.float64] = np.asarray(uses, dtype=np.float64)
        if counts.shape != self._uses.shape or not ((counts >= 0) & np.isfinite(counts)).all():
            raise ValueError(
                f"uses of shape {counts.shape}: need {self._uses.shape}, none endless or below 0"
            )
        keep = 0.5 ** (1.0 / self._rule.half_life)
        self._uses *= keep
        self._uses += counts
        self._rounds = self._rounds * keep + 1.0

    def swaps(self, most: int) -> tuple[Swap, ...]:
        """Swaps to make now, the most useful first. The set counts them as made.

        Parameters
        ----------
        most
            The most swaps that the budget in bytes allows.
        """
        if not self._rounds:
            return ()
        rate = self._uses / self._rounds
        far = np.flatnonzero(~self._near)
        far = far[np.argsort(-rate[far], kind="stable")][:most]
        near = np.flatnonzero(self._near)
        near = near[np.argsort(rate[near], kind="stable")]
        room = self._room - len(near)
        leaving = [-1] * room + [int(item) for item in near]
        done: list[Swap] = []
        for comes, goes in zip(far, leaving, strict=False):
            lost = 0.0 if goes < 0 else float(rate[goes])
            moves = 1.0 if goes < 0 else 2.0
            gained = float(rate[comes]) - lost
            pays = gained * self._rule.repay > moves
            if rate[comes] <= lost * self._rule.margin or not pays:
                break
            self._near[comes] = True
            if goes >= 0:
                self._near[goes] = False
            done.append(Swap(int(comes), goes))
        return tuple(done)
