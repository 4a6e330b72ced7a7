"""What every tuner answers: the share of the bytes that shall lie on the far tier, and the
reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from cxl_offload.memory.bounds import check_number
from cxl_offload.tune.window import Window

NEAR_WEIGHT = 10
"""Weight of the near tier in mixes. Caption's published code changes the other weight only."""

FAR_WEIGHTS = tuple(range(21))
"""Weights of the far tier that a tuner chooses from: shares of 0 to 67 % in steps of 1 to 9 %."""


def check_share(share: float) -> None:
    """Refuses what is no share: no number (TypeError), or not from 0 to 1 (ValueError)."""
    check_number(share, "the share on the far tier", most=1.0)


def share_of_weight(weight: int) -> float:
    """Share of the pages on the far tier for weights of ``NEAR_WEIGHT`` to ``weight``."""
    return weight / (NEAR_WEIGHT + weight)


def weights_of_share(share: float) -> tuple[int, int]:
    """Weights (near, far) for a share: near only, far only, or the closest mix of the grid.

    Raises
    ------
    ValueError
        The share is not in [0, 1].
    """
    check_share(share)
    if share == 0:
        return (1, 0)
    if share == 1:
        return (0, 1)
    far = min(FAR_WEIGHTS[1:], key=lambda weight: abs(share_of_weight(weight) - share))
    return (NEAR_WEIGHT, far)


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision of a tuner.

    Attributes
    ----------
    share
        Share of the bytes that shall lie on the far tier, from 0 to 1.
    reason
        One sentence for the log.
    settled
        Whether the tuner expects to gain nothing from trying further shares.
    """

    share: float
    reason: str
    settled: bool = False


@dataclass(frozen=True, slots=True)
class Bounds:
    """Shares for which both tiers have room; a tuner answers nothing outside of them."""

    lowest: float = 0.0
    highest: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.lowest <= self.highest <= 1:
            raise ValueError(
                f"shares from {self.lowest} to {self.highest}: need 0 <= lowest <= highest <= 1"
            )

    def clamp(self, share: float) -> float:
        """The allowed share that is closest to ``share``."""
        return min(max(share, self.lowest), self.highest)


class Tuner(Protocol):
    """Chooses shares from windows of step times. It moves nothing itself."""

    @property
    def share(self) -> float:
        """The share that is to be in force now."""
        ...

    def decide(self, window: Window, bounds: Bounds = ...) -> Decision:
        """The next share, after a window measured under :attr:`share`."""
        ...

    def hold(self, share: float) -> None:
        """Tells the tuner the share that was reached, because a node was full before all had
        moved."""
        ...

    def saved(self) -> dict[str, Any]:
        """What :meth:`restore` needs, as JSON: numbers, texts, lists and mappings only."""
        ...

    def restore(self, saved: dict[str, Any]) -> None:
        """Goes on where :meth:`saved` was called.

        Raises
        ------
        ConfigError
            The state is of another tuner or is damaged.
        """
        ...
