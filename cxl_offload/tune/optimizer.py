"""One call that tunes where the states of a torch optimizer live."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from cxl_offload.memory import Session, current_session
from cxl_offload.memory.bounds import check_number
from cxl_offload.tune.curves import TierRatios
from cxl_offload.tune.homes import TunedHomes
from cxl_offload.tune.machine import tier_ratios
from cxl_offload.tune.model_based import ModelTuner
from cxl_offload.tune.options import TuneOptions, read_tuning
from cxl_offload.tune.phase_steps import PhaseSteps, follow_phases
from cxl_offload.tune.state_file import read_state
from cxl_offload.tune.step_tuner import StepTuner
from cxl_offload.tune.tiers import near_and_far

COMPUTE, OPTIMIZER = "forward and backward", "optimizer"

_LOG = logging.getLogger("cxl_offload.tune")


def step_tuner(
    tensors: dict[str, torch.Tensor],
    *,
    session: Session,
    near: Sequence[int] | None = None,
    far: Sequence[int] | None = None,
    ratios: TierRatios | None = None,
    budget_bytes_per_step: int = 0,
    state: str | Path | None = None,
    framework: str = "script",
) -> StepTuner:
    """A model-based tuner of tensors that are there; arguments as for :func:`tune_optimizer`."""
    if near is None or far is None:
        near, far = near_and_far(session.machine)
    homes = TunedHomes(tensors, near=near, far=far, session=session)
    known = ratios or tier_ratios(session.machine, near, far)
    tuner = ModelTuner(known, start=homes.share)
    return StepTuner(
        homes,
        tuner,
        budget_bytes_per_step=budget_bytes_per_step,
        state=state,
        framework=framework,
    )


class TunedOptimizer:
    """Follows the steps of one optimizer; made by :func:`tune_optimizer` and the like.

    Attributes
    ----------
    tuner
        The tuner, once the first step has made the states; None before, or where no state lies in
        memory of this package.
    phases
        The same for :func:`tune_optimizer_phases`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        session: Session,
        options: dict[str, Any],
        by_phase: TuneOptions | None = None,
    ) -> None:
        self.tuner: StepTuner | None = None
        self.phases: PhaseSteps | None = None
        self._by_phase = by_phase
        self._threads = torch.get_num_threads()
        self._since = 0.0
        self._session = session
        self._options = options
        self._begun = False
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def _states(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        for number, states in enumerate(optimizer.state.values()):
            for name, value in states.items():
                if not isinstance(value, torch.Tensor) or not value.dim() or not value.numel():
                    continue
                if value.device.type == "cpu" and self._session.find(value.data_ptr()) is not None:
                    yield f"{number}.{name}", value

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._turn(COMPUTE, OPTIMIZER)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.tuner is not None:
            self.tuner.step()
        elif not self._begun:
            self._begun = True
            self._begin(optimizer)
        else:
            self._turn(OPTIMIZER, COMPUTE)

    def _turn(self, ends: str, begins: str) -> None:
        if self.phases is None:
            return
        if self._since:
            self.phases.step(ends, time.perf_counter() - self._since)
        elif begins != COMPUTE:
            return  # where the first pass began nobody knows
        self.phases.begin(begins)
        self._since = time.perf_counter()

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        found = dict(self._states(optimizer))
        if not found:
            _LOG.warning(
                "tune: no state of %s lies in memory of this package; nothing to tune (see "
                "cxl_offload.offload_optimizer and ops.adam.CPUAdam)",
                type(optimizer).__name__,
            )
        elif self._by_phase is not None:
            self.phases = follow_phases(
                found,
                (COMPUTE, OPTIMIZER),
                self._by_phase,
                session=self._session,
                framework="script",
                set_threads=torch.set_num_threads,
            )
            self._turn(OPTIMIZER, COMPUTE)
        else:
            self.tuner = step_tuner(found, session=self._session, **self._options)

    def remove(self) -> None:
        """Stops measuring and moving, and lets go of the states, which stay where they are."""
        for hook in self._hooks:
            hook.remove()
        if self.phases is not None:
            torch.set_num_threads(self._threads)
        self.tuner = self.phases = None


def tune_optimizer(
    optimizer: torch.optim.Optimizer,
    *,
    near: Sequence[int] | None = None,
    far: Sequence[int] | None = None,
    ratios: TierRatios | None = None,
    budget_bytes_per_step: int = 0,
    state: str | Path | None = None,
    session: Session | None = None,
) -> TunedOptimizer:
    """Tunes the share of an optimizer's states on the far tier by the time between its steps.

    Call it after :func:`cxl_offload.offload_optimizer`, or for a :class:`CPUAdam` with a policy.
    States that are replaced later (``load_state_dict``) are no longer followed: call it again.

    Parameters
    ----------
    near, far
        Nodes of the two tiers; by default local DRAM, and CXL memory or DRAM of other sockets.
    ratios
        The far tier against the near one; by default from the machine file or profile.
    budget_bytes_per_step
        Bytes that may move between two steps, in the mean; 0 only logs advice.
    state
        A JSON file that lets a restart go on; ``cxl-offload tune --replay`` reads it too.
    session
        The session that the states are in; None means the optimizer's own, or the current one.

    Raises
    ------
    ConfigError
        The machine has only one tier, or its bandwidths are not known.
    """
    session = session or getattr(optimizer, "session", None) or current_session()
    check_number(budget_bytes_per_step, "the budget in bytes a step")
    read_state(None if state is None else Path(state))
    if near is None or far is None:
        near, far = near_and_far(session.machine)
    options = {
        "near": near,
        "far": far,
        "ratios": ratios or tier_ratios(session.machine, near, far),
        "budget_bytes_per_step": budget_bytes_per_step,
        "state": state,
    }
    return TunedOptimizer(optimizer, session, options)


def tune_optimizer_phases(
    optimizer: torch.optim.Optimizer,
    *,
    budget_bytes_per_change: int = 0,
    threads: Sequence[int] = (),
    state: str | Path | None = None,
    session: Session | None = None,
) -> TunedOptimizer:
    """Tunes an optimizer's step apart from what is between two steps, forward and backward.

    Each has a share of the states on the far tier, where moving between them pays.

    Parameters
    ----------
    budget_bytes_per_change
        Bytes that may move before a phase; less than all states keeps one share; 0 only advises.
    threads
        Numbers of torch's threads that both phases try; each takes the fewest that are not slower.
        Other numbers may round otherwise. Empty: they stay.
    state, session
        As for :func:`tune_optimizer`.

    Raises
    ------
    ConfigError
        As :func:`tune_optimizer`; and for threads that are no numbers from 1, each once.
    """
    session = session or getattr(optimizer, "session", None) or current_session()
    asked = read_tuning(
        "phase_time",
        machine=session.machine,
        budget_bytes=budget_bytes_per_change,
        state=state,
        threads=threads,
    )
    return TunedOptimizer(optimizer, session, {}, by_phase=asked)
