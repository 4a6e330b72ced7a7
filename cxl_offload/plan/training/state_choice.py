"""What an optimizer's states are kept as, where the planner is to choose it.

Fewer bits move fewer bytes in every step, and change the numerics of a training. So they are looked
at only when they are asked for, and taken only where they bring more than the margin of a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cxl_offload.plan.equations.adam_bytes import STATE_TYPES
from cxl_offload.units import format_seconds

AUTO = "auto"
"""Instead of a type: the planner compares all of them."""

FLOAT32 = ""
"""How a plan names states in float32."""

WIDEST_FIRST = (FLOAT32, *STATE_TYPES)

AS_FAST = 1e-6
"""Share of a step by which another is as fast. States in fewer bytes have to bring more than it,
whatever the margin is: they lose precision."""

_NUMERICS = (
    "fewer bits change the numerics of the training, so no plan takes them unasked; one type holds "
    "for all states, on every tier, because CPUAdam has no more than one"
)


class ComparedTypes(NamedTuple):
    """Seconds of a step with each type of ``WIDEST_FIRST``, None where it does not fit."""

    step_s: Mapping[str, float | None]
    margin: float

    def chosen(self) -> str:
        """The widest type that fits, or a narrower one that brings the margin over it.

        A type is held against the one that was taken so far, and not against float32: the last
        bits that are given up have to bring the margin as well.
        """
        taken, least = FLOAT32, self.step_s[FLOAT32]
        for name in STATE_TYPES:
            seconds = self.step_s[name]
            if seconds is None:
                continue
            if least is None or least / seconds - 1 >= max(self.margin, AS_FAST):
                taken, least = name, seconds
        return taken

    def notes(self) -> list[str]:
        """What each would have given, which was taken, and what that means."""
        taken = self.chosen()
        said = ", ".join(f"{name or 'float32'} {self._of(name)}" for name in WIDEST_FIRST)
        return [f"states compared by the step: {said}; {self._why(taken)}", _NUMERICS]

    def _of(self, name: str) -> str:
        seconds, wide = self.step_s[name], self.step_s[FLOAT32]
        if seconds is None:
            return "does not fit"
        if name == FLOAT32 or wide is None:
            return format_seconds(seconds)
        return f"{format_seconds(seconds)} ({wide / seconds - 1:+.1%} tokens/s)"

    def _why(self, taken: str) -> str:
        margin = f"the margin of {self.margin:.1%}"
        if taken == FLOAT32:
            return f"float32 stays, as fewer bits bring less than {margin}"
        if self.step_s[FLOAT32] is None:
            return f"{taken} is taken, as float32 does not fit"
        return f"{taken} is taken, as it brings more than {margin}"
