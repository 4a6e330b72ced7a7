"""Work that alternates between phases: prefill and decode, or forward, backward and optimizer.

Each phase has its own curve over the share on the far tier. Moving pages between phases costs time.
So the shares of a cycle are chosen together: one for all phases, or one for each if the moves
between them cost less than they gain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cxl_offload.arrays import Floats
from cxl_offload.errors import ConfigError
from cxl_offload.memory.bounds import check_number
from cxl_offload.tune.belief import Belief
from cxl_offload.tune.curves import SHARES, TierRatios, curve_family, nearest
from cxl_offload.tune.decision import Bounds
from cxl_offload.tune.model_based import ModelRule, Record, choose
from cxl_offload.tune.state_file import DAMAGED
from cxl_offload.tune.window import Window

_Tries = tuple[dict[str, int], str]

PHASE_RULE = ModelRule(worth=0.0005)
"""A try lasts one cycle only, and phases settle one after the other. So even small gains are worth
a try."""

_CHEAP_MOVES = 0.05
"""Phases try shares of their own only if moving everything there and back takes less than this part
of a cycle."""


@dataclass(frozen=True, slots=True)
class CycleShares:
    """Shares for the phases of one cycle.

    Attributes
    ----------
    shares
        Indices of :data:`~cxl_offload.tune.curves.SHARES`, one a phase, in their order.
    seconds
        Expected time of a cycle, moves included.
    fixed_seconds
        Expected time of a cycle with the best share that is the same in all phases.
    """

    shares: tuple[int, ...]
    seconds: float
    fixed_seconds: float

    @property
    def moves(self) -> bool:
        """Whether pages move between phases."""
        return len(set(self.shares)) > 1


def cycle_shares(phase_s: ArrayLike, *, whole_move_s: float) -> CycleShares:
    """The shares of a cycle with the lowest expected time.

    Exact over all shares of all phases: the phases are a ring, so one is fixed and the others
    follow by dynamic programming.

    Parameters
    ----------
    phase_s
        float ``(phases, shares)``: seconds that each phase takes in a cycle at each share.
    whole_move_s
        Seconds to move all bytes from one tier to the other; a change of the share by a part takes
        that part of it. ``inf`` keeps one share for all phases.

    Raises
    ------
    ValueError
        No phase, or a time that is negative or no number.
    """
    times = np.atleast_2d(np.asarray(phase_s, dtype=np.float64))
    if times.size == 0 or not (times >= 0).all() or not whole_move_s >= 0:
        raise ValueError(f"phase times {times.shape} and a move of {whole_move_s} s: need >= 0")
    shares = np.asarray(SHARES[: times.shape[1]])
    distance = np.abs(shares[:, None] - shares[None, :])
    cost = np.where(distance > 0, distance * whole_move_s, 0.0) if np.isfinite(whole_move_s) else (
        np.where(distance > 0, np.inf, 0.0)
    )  # fmt: skip
    fixed = times.sum(axis=0)
    best_fixed = int(np.argmin(fixed))
    best = CycleShares((best_fixed,) * len(times), float(fixed.min()), float(fixed.min()))
    for first in range(times.shape[1]):
        so_far = np.full(times.shape[1], np.inf)
        so_far[first] = times[0, first]
        came: list[NDArray[np.intp]] = []
        for row in times[1:]:
            ways = so_far[:, None] + cost
            came.append(np.argmin(ways, axis=0))
            so_far = ways.min(axis=0) + row
        closing = so_far + cost[:, first]
        last = int(np.argmin(closing))
        if closing[last] < best.seconds * (1 - 1e-12):
            path = [last]
            for back in reversed(came):
                path.append(int(back[path[-1]]))
            best = CycleShares(tuple(reversed(path)), float(closing[last]), float(fixed.min()))
    return best


class PhaseTuner:
    """Learns the curve of each phase and chooses the shares of the next cycle.

    Parameters
    ----------
    ratios
        The far tier against the near one.
    phases
        Names in the order of a cycle.
    whole_move_s
        Seconds to move all tuned bytes from tier to tier: bytes over the measured rate of moves;
        ``inf`` while nobody knows.
    start
        Share of all phases in the first cycle.
    """

    def __init__(
        self,
        ratios: TierRatios,
        phases: Sequence[str],
        *,
        whole_move_s: float,
        rule: ModelRule = PHASE_RULE,
        start: float = 0.0,
    ) -> None:
        if not phases or len(set(phases)) != len(phases):
            raise ValueError(f"phases {list(phases)}: need at least one, each once")
        family = curve_family(ratios)
        self.phases = tuple(phases)
        self._rule = rule
        self.moves_take(whole_move_s)
        self._records = {phase: Record(family) for phase in phases}
        self._at = dict.fromkeys(phases, nearest(start))

    @property
    def shares(self) -> dict[str, float]:
        """The share that is to be in force in each phase."""
        return {phase: SHARES[at] for phase, at in self._at.items()}

    def moves_take(self, whole_move_s: float) -> None:
        """Seconds that moving all tuned bytes from tier to tier takes, as measured."""
        check_number(whole_move_s, "whole_move_s")
        self._move_s = whole_move_s

    def hold(self, shares: Mapping[str, float]) -> None:
        """The shares that are in force after all, of every phase."""
        self._at = {phase: nearest(shares[phase]) for phase in self.phases}

    def saved(self) -> dict[str, Any]:
        """What :meth:`restore` needs, as JSON."""
        return {
            "tuner": "phases",
            "at": self._at,
            "measured": {phase: record.saved() for phase, record in self._records.items()},
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Goes on where :meth:`saved` was called.

        Raises
        ------
        ConfigError
            The state is of other phases or is damaged.
        """
        try:
            at = {phase: int(saved["at"][phase]) for phase in self.phases}
            if saved["tuner"] != "phases" or not all(0 <= one < len(SHARES) for one in at.values()):
                raise ValueError("at")
            for phase, record in self._records.items():
                record.restore(saved["measured"][phase])
        except DAMAGED as problem:
            raise ConfigError(
                f"the saved state is not that of the phases {', '.join(self.phases)}"
            ) from problem
        self._at = at

    def decide(
        self,
        windows: Mapping[str, Window],
        steps: Mapping[str, float],
        bounds: Bounds = Bounds(),  # noqa: B008 - frozen
    ) -> tuple[dict[str, float], str]:
        """Shares of the next cycle and the reason.

        Parameters
        ----------
        windows
            Step times of each phase, measured under :attr:`shares`.
        steps
            How many steps each phase has in a cycle, in the mean.
        """
        for phase in self.phases:
            self._records[phase].note(self._at[phase], windows[phase], self._rule)
        beliefs = {phase: self._records[phase].belief() for phase in self.phases}
        times = np.array([np.exp(beliefs[phase].log_s) * steps[phase] for phase in self.phases])
        part = times.min(axis=1) / times.min(axis=1).sum()
        outside = [not bounds.lowest <= share <= bounds.highest for share in SHARES]
        times[:, outside] = np.inf if not all(outside) else times[:, outside]
        chosen = cycle_shares(times, whole_move_s=self._move_s)
        best = dict(zip(self.phases, chosen.shares, strict=True))
        if 2.0 * self._move_s <= _CHEAP_MOVES * chosen.seconds:
            found = self._tries_apart(beliefs, part, best, bounds)
        else:
            found = self._tries_together(beliefs, part, bounds)
        if found is not None:
            self._at, reason = found
            return self.shares, reason
        self._at = best
        if chosen.moves:
            gain = 1.0 - chosen.seconds / chosen.fixed_seconds
            return (
                self.shares,
                f"a share for each phase: moves cost less than the {gain:.1%} gained",
            )
        return self.shares, "one share for all phases: moves between them would cost what they gain"

    def _tries_apart(
        self,
        beliefs: Mapping[str, Belief],
        part: Floats,
        best: Mapping[str, int],
        bounds: Bounds,
    ) -> _Tries | None:
        """Every phase tries its most promising share. Those with nothing to try stay."""
        at, told = dict(best), []
        for weight, phase in zip(part, self.phases, strict=True):
            tried = set(self._records[phase].measured)
            _, try_next, gain = choose(beliefs[phase], tried, self._rule, bounds)
            if gain * min(1.0, len(part) * weight) > self._rule.worth:
                at[phase] = try_next
                told.append(f"{phase} at {SHARES[try_next]:.0%} far may gain {gain:.1%}")
        return (at, "; ".join(told)) if told else None

    def _tries_together(
        self, beliefs: Mapping[str, Belief], part: Floats, bounds: Bounds
    ) -> _Tries | None:
        """The share that promises most where all phases have the same."""
        ways = [
            (beliefs[phase], float(weight)) for phase, weight in zip(self.phases, part, strict=True)
        ]
        tried = set.intersection(*(set(self._records[phase].measured) for phase in self.phases))
        _, at, gain = choose(Belief.of_sum(ways), tried, self._rule, bounds)
        if gain <= self._rule.worth:
            return None
        reason = f"all phases at {SHARES[at]:.0%} far: may gain {gain:.1%}"
        return dict.fromkeys(self.phases, at), reason
