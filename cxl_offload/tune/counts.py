"""How often the tuners of this process have decided what. Metrics export it."""

from __future__ import annotations

import os
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from cxl_offload.events import tell

Outcome = Literal["moved", "kept", "advised", "refused"]
"""``moved``: pages are to move, or new regions to lie elsewhere. ``kept``: all stays as it is.
``advised``: something would be gained, and no budget allows it. ``refused``: a node was full."""

_lock = threading.Lock()
_counts: Counter[tuple[str, str, Outcome]] = Counter()
_bytes: Counter[tuple[str, str, Outcome]] = Counter()


@dataclass(frozen=True, slots=True)
class DecisionCount:
    """Decisions of one kind.

    Attributes
    ----------
    framework
        Who asked for the tuning: ``"deepspeed"``, ``"transformers"``, ...; ``"script"`` for a
        tuner that a script made by itself.
    tuner
        ``"share"`` for the share of the far tier, ``"hot"`` for items that are asked for often.
    outcome
        See :data:`Outcome`.
    count
        Decisions since the process began.
    nbytes
        Bytes that moved by them.
    """

    framework: str
    tuner: str
    outcome: Outcome
    count: int
    nbytes: int


def count_decision(
    framework: str,
    tuner: str,
    outcome: Outcome,
    *,
    count: int = 1,
    nbytes: int = 0,
    reason: str | None = None,
) -> None:
    """Counts one more decision, and logs it as an event.

    Parameters
    ----------
    count
        0 adds bytes to decisions that were counted before.
    nbytes
        Bytes that have moved.
    reason
        In words, where the tuner gave one.
    """
    key = (framework, tuner, outcome)
    with _lock:
        _counts[key] += count
        _bytes[key] += nbytes
    if count or nbytes:
        said = {"framework": framework, "tuner": tuner, "outcome": outcome}
        tell("decision" if count else "tuner moved", **said, moved_bytes=nbytes, reason=reason)


def decisions() -> tuple[DecisionCount, ...]:
    """All decisions of this process, sorted by who made them."""
    with _lock:
        return tuple(
            DecisionCount(*key, count=_counts[key], nbytes=_bytes[key]) for key in sorted(_counts)
        )


def _forget_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may have held it
    _counts.clear()
    _bytes.clear()


os.register_at_fork(after_in_child=_forget_in_child)
