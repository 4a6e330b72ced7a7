"""Chooses how many threads a phase computes with: the fewest that are not slower than the best.

Threads beyond those that saturate a tier's bandwidth bring nothing (Wang et al., Performance
Characterization of CXL Memory, III), and phases saturate at different numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from cxl_offload.errors import ConfigError
from cxl_offload.memory.bounds import check_size

AS_FAST = 0.02
"""If two medians differ by less than this fraction, the smaller number of threads is taken."""


class ThreadChoice:
    """Tries numbers of threads one after another, then stays with the best.

    Parameters
    ----------
    candidates
        Numbers of threads, each once.
    steps
        Steps that each is tried for; the first of them is left out.
    """

    def __init__(self, candidates: Sequence[int], *, steps: int = 8) -> None:
        for one in candidates:
            check_size(one, "a number of threads")
        if not candidates or len(set(candidates)) != len(candidates):
            raise ValueError(f"threads {list(candidates)}: need some, each once, at least 1")
        if steps < 2:
            raise ValueError(f"{steps} steps a number of threads: need at least 2")
        self._left = sorted(candidates)
        self._steps = steps
        self._times: list[float] = []
        self._found: dict[int, float] = {}
        self.count = self._left[0]

    @property
    def is_settled(self) -> bool:
        """Whether all have been tried."""
        return not self._left

    def note(self, seconds: float) -> None:
        """One step took so long with :attr:`count` threads."""
        if self.is_settled:
            return
        self._times.append(seconds)
        if len(self._times) < self._steps:
            return
        self._found[self.count] = median(self._times[1:])
        self._times = []
        self._left.pop(0)
        if self._left:
            self.count = self._left[0]
            return
        best = min(self._found.values())
        good = [count for count, found in self._found.items() if found <= (1 + AS_FAST) * best]
        self.count = min(good)

    def saved(self) -> dict[str, Any]:
        """What :meth:`restore` needs, as JSON; a choice that is not settled begins again."""
        return {"count": self.count if self.is_settled else None}

    def restore(self, saved: dict[str, Any]) -> None:
        """Takes the settled choice of an earlier run.

        Raises
        ------
        ConfigError
            The state is damaged.
        """
        count = saved.get("count") if isinstance(saved, dict) else 0
        if count is None:
            return
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError("the saved state is not that of a number of threads")
        self.count, self._left = count, []


@dataclass(frozen=True, slots=True)
class PhaseThreads:
    """Numbers of threads of phases.

    Attributes
    ----------
    choices
        Phase to its choice; other phases keep the number that there is.
    set_threads
        Sets it, for example ``torch.set_num_threads``.
    """

    choices: Mapping[str, ThreadChoice]
    set_threads: Callable[[int], None]

    @property
    def is_settled(self) -> bool:
        """Whether every phase has its number."""
        return all(choice.is_settled for choice in self.choices.values())

    def begin(self, phase: str) -> None:
        """A phase begins."""
        if phase in self.choices:
            self.set_threads(self.choices[phase].count)

    def note(self, phase: str, seconds: float) -> None:
        """It took so long."""
        if phase in self.choices:
            self.choices[phase].note(seconds)

    def saved(self) -> dict[str, Any]:
        """What :meth:`restore` needs, as JSON."""
        return {name: choice.saved() for name, choice in self.choices.items()}

    def restore(self, saved: dict[str, Any]) -> None:
        """As :meth:`ThreadChoice.restore`, of every phase."""
        for name, choice in self.choices.items():
            choice.restore(saved[name])
