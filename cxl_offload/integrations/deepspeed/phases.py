"""Forward, backward and optimizer of an engine, each with a share and threads of its own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from cxl_offload.integrations.deepspeed.kinds import STREAMED
from cxl_offload.tune.optimizer import OPTIMIZER
from cxl_offload.tune.options import TuneOptions
from cxl_offload.tune.phase_steps import PhaseSteps, follow_phases

if TYPE_CHECKING:
    from cxl_offload.integrations.deepspeed.attached import AttachedEngine

FORWARD, BACKWARD = "forward", "backward"
BOTH = "forward and backward"
"""One phase where gradients accumulate over several passes: pages do not move between those."""


class PhasedEngine:
    """Follows the phases of an engine; made by ``placing(..., tune="phase_time")``.

    Backward is from the end of the forward pass to the engine's step, so the loss is in it. Times
    are the host's: what a GPU still computes counts where the host next waits for it.

    Attributes
    ----------
    steps
        What is decided; None before the first step, and where the engine has nothing on the host.
    """

    def __init__(self, engine: Any, attached: AttachedEngine, options: TuneOptions) -> None:
        self.steps: PhaseSteps | None = None
        self._attached = attached
        self._options = options
        accumulates = engine.gradient_accumulation_steps() > 1
        self._phases = (BOTH, OPTIMIZER) if accumulates else (FORWARD, BACKWARD, OPTIMIZER)
        self._threads = torch.get_num_threads()
        self._begun = self._in_cycle = False
        self._since = 0.0
        self._engine = ref(engine)
        engine.step = self._step
        self._hooks = [
            engine.register_forward_pre_hook(self._before_forward),
            engine.register_forward_hook(self._after_forward),
        ]

    def remove(self) -> None:
        """Stops measuring and moving, and lets go of the tensors, which stay where they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        engine = self._engine()
        if engine is not None and vars(engine).pop("step", None) is not None:
            torch.set_num_threads(self._threads)
        self.steps = None

    def _before_forward(self, engine: Any, inputs: Any) -> None:
        if self.steps is not None and not self._in_cycle:
            self._in_cycle = True
            self._turn_to(self._phases[0])

    def _after_forward(self, engine: Any, inputs: Any, output: Any) -> None:
        if self.steps is not None and self._in_cycle and BACKWARD in self._phases:
            self._ends(FORWARD)
            self._turn_to(BACKWARD)

    def _step(self, *args: Any, **options: Any) -> Any:
        engine: Any = self._engine()
        last = engine.is_gradient_accumulation_boundary()
        follows = self.steps is not None and self._in_cycle and last
        if follows:
            self._ends(self._phases[-2])
            self._turn_to(OPTIMIZER)
        done = type(engine).step(engine, *args, **options)
        if follows:
            self._ends(OPTIMIZER)
            self._in_cycle = False
        elif last and not self._begun:
            self._begin()
        return done

    def _turn_to(self, phase: str) -> None:
        assert self.steps is not None
        self.steps.begin(phase)
        self._since = time.perf_counter()

    def _ends(self, phase: str) -> None:
        assert self.steps is not None
        self.steps.step(phase, time.perf_counter() - self._since)

    def _begin(self) -> None:
        self._begun = True
        found = self._attached.placed_tensors(STREAMED)
        if found:
            self.steps = follow_phases(
                found,
                self._phases,
                self._options,
                session=self._attached.store.session,
                framework="deepspeed",
                set_threads=torch.set_num_threads,
            )
