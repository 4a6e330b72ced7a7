"""Follows a program that goes through phases: sets shares and threads of each, and moves pages
between them.

The next phase is known, so its pages move before it begins. Whether that pays depends on the time
that moves have taken on this machine.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cxl_offload.errors import ConfigError
from cxl_offload.memory import Session
from cxl_offload.memory.bounds import check_number, check_size
from cxl_offload.tune.counts import count_decision
from cxl_offload.tune.gate import Gate, one_at_a_time
from cxl_offload.tune.homes import TunedHomes
from cxl_offload.tune.machine import tier_ratios
from cxl_offload.tune.options import TuneOptions
from cxl_offload.tune.phases import PhaseTuner
from cxl_offload.tune.state_file import DAMAGED, read_state, write_state
from cxl_offload.tune.threads import PhaseThreads, ThreadChoice
from cxl_offload.tune.tiers import near_and_far
from cxl_offload.tune.window import StepSamples

if TYPE_CHECKING:
    import torch

_FEW_PASSES = 5
"""Of each phase for a decision, where phases are those of a framework: prompts are long."""

_LOG = logging.getLogger("cxl_offload.tune")


class PhaseSteps:
    """Measures phases, asks a :class:`PhaseTuner`, and moves pages between phases.

    Put every phase of a cycle into ``with steps.phase(name)``, in the tuner's order. A program that
    learns of phases by callbacks calls :meth:`begin` when a phase begins, and :meth:`step` after
    each of its steps.

    Parameters
    ----------
    homes
        The tensors and their two tiers.
    tuner
        Decides for all phases together.
    budget_bytes_per_change
        Bytes that may move between two phases. With less than all tuned bytes, phases share one
        placement, and moving to it takes several changes. 0 only advises.
    threads
        Chooses numbers of threads too, before shares are tried. None leaves them as they are.
    samples
        Passes of every phase that make up a decision.
    state
        A JSON file from which a restart goes on; None keeps none.
    framework
        For the counts of decisions.
    clock
        Seconds, monotonic.

    Raises
    ------
    ConfigError
        The state file is damaged or of other phases.
    """

    def __init__(
        self,
        homes: TunedHomes,
        tuner: PhaseTuner,
        *,
        budget_bytes_per_change: int = 0,
        threads: PhaseThreads | None = None,
        samples: int = 10,
        state: str | Path | None = None,
        framework: str = "script",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_number(budget_bytes_per_change, "the budget in bytes a change of phase")
        self._gate = Gate()
        self.homes = homes
        self.tuner = tuner
        self._budget = budget_bytes_per_change
        self._threads = threads or PhaseThreads({}, lambda count: None)
        self._samples = {name: StepSamples(steps=samples, warm_up=1) for name in tuner.phases}
        self._steps: Counter[str] = Counter()
        self._cycles = 0
        self._late = False  # on the way to a shared placement: windows would mix two of them
        self._state = None if state is None else Path(state)
        self._framework = framework
        self._clock = clock
        self._reason = ""
        if budget_bytes_per_change < homes.nbytes:
            tuner.moves_take(float("inf"))
        saved = read_state(self._state)
        if saved is not None:
            self._restore(saved)
        self._prepare(tuner.phases[0])

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One pass of a phase; after it, pages move for the phase that follows."""
        self._check(name)
        following = self.tuner.phases[(self.tuner.phases.index(name) + 1) % len(self.tuner.phases)]
        began = self._clock()
        yield
        self.step(name, self._clock() - began)
        self.begin(following)

    def _check(self, name: str) -> None:
        if name not in self.tuner.phases:
            raise ValueError(f"no phase {name!r}; there are {', '.join(self.tuner.phases)}")

    @one_at_a_time
    def step(self, name: str, seconds: float, *, equal_parts: int = 1) -> None:
        """One step of a phase took so long, without moves.

        Parameters
        ----------
        equal_parts
            Of the step, such as the tokens of a prompt: steps of other numbers compare by one part.
        """
        self._check(name)
        check_size(equal_parts, "equal_parts")
        seconds /= equal_parts
        if not self._threads.is_settled:
            self._threads.note(name, seconds)
        elif not self._late:
            self._samples[name].add(seconds)
            self._steps[name] += equal_parts

    @one_at_a_time
    def restart(self, name: str) -> None:
        """The steps of a phase do another amount of work from here on."""
        self._check(name)
        self._samples[name].restart()

    @one_at_a_time
    def begin(self, name: str) -> None:
        """A phase begins: its threads are set and its pages have moved when this returns.

        No copy from or to the tensors may be under way. The first phase begins a new cycle.
        """
        self._check(name)
        if name == self.tuner.phases[0] and any(self._steps.values()):
            self._cycles += 1
            self._cycle_ends()
        self._prepare(name)

    def _prepare(self, name: str) -> None:
        """Threads and pages of a phase, before it begins."""
        self._threads.begin(name)
        if not self._budget:
            return
        self.homes.aim(self.tuner.shares[name])
        if not self.homes.pending_bytes:
            self._late = False
            return
        began = self._clock()
        moved = self.homes.advance(self._budget)
        took = self._clock() - began
        self._late = bool(self.homes.pending_bytes)
        count_decision(self._framework, "phase", "moved", count=0, nbytes=moved.nbytes)
        if moved.refused is not None:
            count_decision(self._framework, "phase", "refused", reason=moved.refused)
            _LOG.warning("tune: moves before phase %s stopped: %s", name, moved.refused)
            self.tuner.hold(dict.fromkeys(self.tuner.phases, self.homes.share))
        elif moved.nbytes and self._budget >= self.homes.nbytes:
            self.tuner.moves_take(took * self.homes.nbytes / moved.nbytes)

    def _cycle_ends(self) -> None:
        if not all(samples.is_full for samples in self._samples.values()):
            return
        passes = {name: self._steps[name] / self._cycles for name in self.tuner.phases}
        windows = {
            name: samples.take(policy_changed=True) for name, samples in self._samples.items()
        }
        shares = dict(self.tuner.shares)
        made, reason = self.tuner.decide(windows, passes, self.homes.bounds())
        self._steps.clear()
        self._cycles = 0
        changes = made != shares
        if self._budget:
            outcome = "moved" if changes else "kept"
        else:
            outcome = "advised" if changes and reason != self._reason else "kept"
            self.tuner.hold(shares)  # nothing moves: the next windows are of the same shares
        count_decision(self._framework, "phase", outcome, reason=reason)  # type: ignore[arg-type]
        if reason != self._reason:
            self._reason = reason
            _LOG.info("tune%s: %s", "" if self._budget else ", advice only", reason)
        if self._state is not None:
            saved = {"phases": self.tuner.saved(), "threads": self._threads.saved()}
            write_state(self._state, saved)

    def _restore(self, saved: dict[str, object]) -> None:
        try:
            phases, threads = saved["phases"], saved["threads"]
            self.tuner.restore(phases)  # type: ignore[arg-type]
            self._threads.restore(threads)  # type: ignore[arg-type]
        except ConfigError as problem:
            raise ConfigError(f"{self._state}: {problem}") from problem
        except DAMAGED as problem:
            raise ConfigError(f"{self._state}: not the saved state of these phases") from problem


def follow_phases(
    tensors: Mapping[str, torch.Tensor],
    phases: Sequence[str],
    options: TuneOptions,
    *,
    session: Session,
    framework: str,
    set_threads: Callable[[int], None],
    clock: Callable[[], float] = time.perf_counter,
) -> PhaseSteps:
    """Phases of a framework, as its options ask for.

    The time of a move is not known until pages have moved once, so phases share a placement at
    first.

    Raises
    ------
    ConfigError
        One tier only, unknown bandwidths, or a state file that is damaged or of other phases.
    """
    near, far = near_and_far(session.machine)
    homes = TunedHomes(tensors, near=near, far=far, session=session)
    ratios = tier_ratios(session.machine, near, far)
    tuner = PhaseTuner(ratios, phases, whole_move_s=float("inf"), start=homes.share)
    choices = {name: ThreadChoice(options.threads) for name in phases} if options.threads else {}
    return PhaseSteps(
        homes,
        tuner,
        budget_bytes_per_change=options.budget_bytes,
        threads=PhaseThreads(choices, set_threads),
        samples=_FEW_PASSES,
        state=options.state,
        framework=framework,
        clock=clock,
    )
