"""Whether a replay of a plan's bytes agrees with the equations that chose the plan.

The equations and a replay are separate ways from bytes to seconds; a plan says where they differ by
more than ``REPLAY_TOLERANCE``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from cxl_offload.errors import ConfigError
from cxl_offload.sim import Engines, Trace, replay
from cxl_offload.topology import Machine

REPLAY_TOLERANCE = 0.10
"""Difference from which a plan names what its equations and a replay disagree on."""

NOT_SIMULATED = (
    "not replayed: the simulator, which checks a plan's times, knows machines with one GPU"
)
"""Of plans for several GPUs."""

_STATED = re.compile(r"a replay of the (.+) takes .* the equations say .*: ([+-]\d+)%; trust")


class Replay(Protocol):
    """Charges time for a trace on a machine: seconds of every phase."""

    def __call__(self, trace: Trace, machine: Machine, engines: Engines) -> Mapping[str, float]:
        """Phase to seconds.

        Raises
        ------
        ConfigError
            The machine lacks a number that the replay needs; it guesses none.
        """


def simulated_seconds(trace: Trace, machine: Machine, engines: Engines) -> Mapping[str, float]:
    """Seconds of every phase by :func:`cxl_offload.sim.replay`."""
    return replay(trace, machine, engines=engines).phase_seconds


@dataclass(frozen=True, slots=True)
class ReplayCheck:
    """One phase by both; ``difference`` is replayed / equations - 1."""

    phase: str
    equations_s: float
    replayed_s: float

    @property
    def difference(self) -> float:
        """How much longer (or shorter, below 0) the replay takes."""
        return self.replayed_s / self.equations_s - 1

    @property
    def agrees(self) -> bool:
        """Whether both are within the tolerance."""
        return abs(self.difference) <= REPLAY_TOLERANCE

    def sentence(self) -> str:
        """For the notes of a plan."""
        return (
            f"a replay of the {self.phase} takes {self.replayed_s:.4g} s (simulated), the "
            f"equations say {self.equations_s:.4g} s: {self.difference:+.0%}; trust neither to "
            "less than that"
        )


def stated_differences(notes: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Phases and percents of the sentences of :class:`ReplayCheck` among a plan's notes."""
    for note in notes:
        if found := _STATED.match(note):
            yield found[1], int(found[2])


def disagreements(
    equations: Mapping[str, float], replayed: Callable[[], Mapping[str, float]]
) -> list[str]:
    """Sentences for a plan's notes: phases that differ, or why there was no replay.

    Parameters
    ----------
    equations
        Seconds of every phase, above 0.
    replayed
        Replays; phases that it leaves out are not compared.
    """
    try:
        seconds = replayed()
    except ConfigError as error:
        return [f"not replayed: {error}"]
    checks = (
        ReplayCheck(phase, by_equations, seconds[phase])
        for phase, by_equations in equations.items()
        if phase in seconds
    )
    return [check.sentence() for check in checks if not check.agrees]
