"""Tunes the share on the far tier from step times, at step boundaries, with no privileges."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from cxl_offload.errors import ConfigError
from cxl_offload.memory.bounds import check_number
from cxl_offload.tune.counts import Outcome, count_decision
from cxl_offload.tune.decision import Decision, Tuner
from cxl_offload.tune.gate import Gate, one_at_a_time
from cxl_offload.tune.homes import TunedHomes
from cxl_offload.tune.recording import RECORDING, StepRecording, recorded_before
from cxl_offload.tune.state_file import read_state, write_state
from cxl_offload.tune.window import StepSamples

_ROUNDED = 0.01
"""Rounding to whole granules explains a difference of two shares up to this."""

_MOST_PATIENCE = 16
"""A settled tuner's windows are up to this many times as long, because a decision takes
milliseconds, and a window of twenty short steps hardly more than a hundred."""

_LOG = logging.getLogger("cxl_offload.tune")


class StepTuner:
    """Measures steps, asks a tuner, and moves tensors between steps.

    Call :meth:`step` once after every step. With a budget, decisions are carried out; without one
    they are only reported, and nothing ever moves.

    Parameters
    ----------
    homes
        The tensors and their two tiers.
    tuner
        Who decides, for example :class:`cxl_offload.tune.ModelTuner`.
    budget_bytes_per_step
        Bytes that may move between two steps, in the mean; 0 only advises.
    steps, warm_up
        Steps measured for a decision, and steps left out after a change. Every decision that leaves
        the tuner settled doubles the steps of the next one, up to sixteen times as many. Any other
        decision, and :meth:`restart`, goes back to ``steps``.
    state
        A JSON file: read now where it exists, written after every decision, so that a restart
        goes on. It has the windows too, for ``cxl-offload tune --replay``. None keeps no state.
    recording
        Collects the windows elsewhere.
    on_decision
        Called with every decision.
    framework
        For the counts of :func:`cxl_offload.tune.decisions`.
    clock
        Seconds, monotonic.

    Attributes
    ----------
    homes
        As given.
    decisions
        How many were made: those that asked for nothing new in advice-only mode do not count.

    Raises
    ------
    ConfigError
        The state file is damaged or of another tuner.
    """

    # Many parameters: by keyword only, each with a default.
    def __init__(
        self,
        homes: TunedHomes,
        tuner: Tuner,
        *,
        budget_bytes_per_step: int = 0,
        steps: int = 20,
        warm_up: int = 3,
        state: str | Path | None = None,
        recording: StepRecording | None = None,
        on_decision: Callable[[Decision], None] | None = None,
        framework: str = "script",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_number(budget_bytes_per_step, "the budget in bytes a step")
        self._gate = Gate()
        self.homes = homes
        self._tuner = tuner
        self._budget = budget_bytes_per_step
        self._times = StepSamples(steps=steps, warm_up=warm_up)
        self._steps = steps
        self._state = None if state is None else Path(state)
        if recording is None and state is not None:
            recording = StepRecording(getattr(tuner, "ratios", None))
        self._recording = recording
        self._on_decision = on_decision
        self._framework = framework
        self._clock = clock
        self._last: float | None = None
        self._advised: float | None = None
        self._moving = False
        self.decisions = 0
        if self._state is not None:
            self._restore(self._state)
        if self._budget:
            self.homes.aim(self._tuner.share)
            self._moving = self.homes.pending_bytes > 0

    @property
    def is_moving(self) -> bool:
        """Whether the next :meth:`step` moves pages. Nothing may copy from or to them meanwhile."""
        return self._moving

    @one_at_a_time
    def step(self, seconds: float | None = None) -> None:
        """Ends a step. Pages may move before this returns. A forked child's does nothing.

        Parameters
        ----------
        seconds
            What it took; None takes the time since the last call, moves not included.
        """
        now = self._clock()
        if seconds is None and self._last is not None:
            seconds = now - self._last
        if self._moving:
            self._advance()
        elif seconds is not None:
            self._times.add(seconds)
            if self._times.is_full:
                self._decide()
        self._last = self._clock()

    @one_at_a_time
    def restart(self) -> None:
        """Discards the current window, because the workload has changed.

        Call it for a change that you know of, such as another number of sequences.
        """
        self._times.restart()
        self._times.steps = self._steps

    def _count(
        self, outcome: Outcome, *, count: int = 1, nbytes: int = 0, reason: str | None = None
    ) -> None:
        count_decision(self._framework, "share", outcome, count=count, nbytes=nbytes, reason=reason)

    def _advance(self) -> None:
        moved = self.homes.advance(self._budget)
        self._count("moved", count=0, nbytes=moved.nbytes)
        self._moving = self.homes.pending_bytes > 0
        share = self.homes.share
        if not self._moving and abs(share - self._tuner.share) > _ROUNDED:
            self._tuner.hold(share)  # a node was full, or the tensors are too small for the share
        if moved.refused is not None:
            self._count("refused", reason=moved.refused)
            _LOG.warning("tune: moves stopped at %.0f %% far: %s", 100 * share, moved.refused)
        self._times.restart()

    def _decide(self) -> None:
        before = self._tuner.share
        window = self._times.take(policy_changed=False)
        if self._recording is not None:
            self._recording.add(before, window)
        decision = self._tuner.decide(window, self.homes.bounds())
        nothing_new = decision.settled or decision.share == self._advised
        longer = min(2 * self._times.steps, _MOST_PATIENCE * self._steps)
        self._times.steps = longer if nothing_new else self._steps
        if not self._budget:
            # Nothing moves, so the next window is measured under the same share as this one.
            self._tuner.hold(before)
            self._save()
            if decision.share in (before, self._advised):
                self._count("kept", reason=decision.reason)
                return
            self._count("advised", reason=decision.reason)
            self._advised = decision.share
            _LOG.info("tune, advice only: %s", decision.reason)
        else:
            _LOG.info("tune: %s", decision.reason)
            outcome: Outcome = "kept" if decision.share == before else "moved"
            self._count(outcome, reason=decision.reason)
            if decision.share != before:
                self.homes.aim(decision.share)
                self._moving = True
                self._times.restart()
            self._save()
        self.decisions += 1
        if self._on_decision is not None:
            self._on_decision(decision)

    def _save(self) -> None:
        if self._state is not None:
            saved = self._tuner.saved()
            if self._recording is not None:
                saved[RECORDING] = self._recording.document()
            write_state(self._state, saved)

    def _restore(self, path: Path) -> None:
        saved = read_state(path)
        if saved is None:
            return
        try:
            self._tuner.restore(saved)
        except ConfigError as problem:
            raise ConfigError(f"{path}: {problem}") from problem
        if self._recording is not None:
            before = recorded_before(saved, path, self._recording.ratios)
            self._recording.windows[:0] = before.windows
