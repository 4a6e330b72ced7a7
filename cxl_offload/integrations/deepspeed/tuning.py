"""Tunes where the optimizer's tensors of an engine live, by the time of its steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cxl_offload.integrations.deepspeed.kinds import STREAMED
from cxl_offload.tune.optimizer import step_tuner
from cxl_offload.tune.options import TuneOptions
from cxl_offload.tune.step_tuner import StepTuner

if TYPE_CHECKING:
    from cxl_offload.integrations.deepspeed.attached import AttachedEngine


class TunedEngine:
    """Follows the steps of an engine; made by ``placing(..., tune="step_time")``.

    A step is over at the first forward pass after the optimizer has stepped: then gradients are
    consumed, parameters are back, and no copy of the optimizer's tensors is under way.

    Attributes
    ----------
    tuner
        The tuner; None before the first step, and where the engine has nothing on the host.
    """

    def __init__(self, engine: Any, attached: AttachedEngine, options: TuneOptions) -> None:
        self.tuner: StepTuner | None = None
        self._attached = attached
        self._options = options
        self._steps = engine.global_steps
        self._begun = False
        self._hook = engine.register_forward_pre_hook(self._before_forward)

    def remove(self) -> None:
        """Stops measuring and moving, and lets go of the tensors, which stay where they are."""
        self._hook.remove()
        self.tuner = None

    def _before_forward(self, engine: Any, inputs: Any) -> None:
        if engine.global_steps == self._steps:
            return
        self._steps = engine.global_steps
        if not self._begun:
            self._begin()
        elif self.tuner is not None:
            self.tuner.step()

    def _begin(self) -> None:
        self._begun = True
        found = self._attached.placed_tensors(STREAMED)
        if found:
            session = self._attached.store.session
            self.tuner = step_tuner(
                found,
                session=session,
                budget_bytes_per_step=self._options.budget_bytes,
                state=self._options.state,
                framework="deepspeed",
            )


def state_of_rank(state: Path | None, rank: int) -> Path | None:
    """Every rank tunes its own tensors, so each has a state file of its own."""
    if state is None or rank == 0:
        return state
    return state.with_name(f"{state.stem}.rank{rank}{state.suffix}")
