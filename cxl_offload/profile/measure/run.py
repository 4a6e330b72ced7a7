"""Measures a machine's profile: lists what there is to measure, divides the time, and measures."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from datetime import datetime, timezone

from cxl_offload.profile.fingerprint import read_fingerprint
from cxl_offload.profile.measure import probe
from cxl_offload.profile.measure.effort import FULL, RATES, Effort
from cxl_offload.profile.measure.findings import Findings, Job
from cxl_offload.profile.measure.gpu import CopyProbe, CudaGpus, Gpus
from cxl_offload.profile.measure.jobs import (
    MeasureRequest,
    choose_jobs,
    refuse_simulated,
    targets_of,
)
from cxl_offload.profile.measure.path import PathProbe
from cxl_offload.profile.measure.probe import Allocator
from cxl_offload.profile.measure.sweep import SweepProbe
from cxl_offload.profile.model import Profile
from cxl_offload.profile.schedule import Progress, Schedule

FULL_SECONDS = 110.0
"""Seconds of one path (CPUs of a node, memory of a node), of each sweep, and of all copies."""

QUICK_SECONDS = 8.0

_log = logging.getLogger(__name__)


class Measurement:
    """A measurement that is planned and checked, and not yet made.

    Parameters
    ----------
    session
        Where buffers come from; its machine says which nodes there are. Its caches are trimmed
        afterwards.
    mode
        ``FULL``, ``QUICK`` or ``RATES``: how many points of what, and over how much memory.
    seconds_per_path
        Bound for each path, each sweep and all copies; by default 110 s, and 8 s unless ``FULL``.
        What there is no time for is left out, and a note says so.
    nodes, initiators
        Node ids whose memory, and from whose CPUs, to measure; by default all usable ones.
    interleaves
        Sets of two and more nodes to sweep weighted interleaves over, from every initiator; by
        default all measured nodes together, if there are two or more and the mode is ``FULL``.
    working_set_bytes
        In place of a multiple of the last-level cache: for memory that is very slow, or small.
    gpus
        Whose copies are measured too; by default those of the CUDA driver, if there is one. That
        takes a GPU's primary context while its copies are measured.

    Raises
    ------
    ValueError
        The memory is simulated, a node cannot be measured, or there is too little of it.
    """

    def __init__(
        self,
        session: Allocator,
        *,
        mode: Effort = FULL,
        seconds_per_path: float | None = None,
        nodes: Sequence[int] | None = None,
        initiators: Sequence[int] | None = None,
        interleaves: Sequence[tuple[int, ...]] | None = None,
        working_set_bytes: int | None = None,
        gpus: Gpus | None = None,
    ) -> None:
        refuse_simulated(session)
        if seconds_per_path is None:
            seconds_per_path = FULL_SECONDS if mode.mode == "full" else QUICK_SECONDS
        if not seconds_per_path > 0:
            raise ValueError(f"measure for {seconds_per_path} s: give a time above 0")
        request = MeasureRequest(mode, nodes, initiators, interleaves, working_set_bytes)
        fingerprint = read_fingerprint(session.machine, isa=probe.best_isa())
        self._session = session
        self._mode = mode
        self._fingerprint = fingerprint
        thp = fingerprint.transparent_huge_pages
        self._jobs = choose_jobs(session, request, gpus or CudaGpus(), thp=thp)
        self._schedules = [self._schedule(job, seconds_per_path) for job in self._jobs]

    @staticmethod
    def _schedule(job: Job, budget_s: float) -> Schedule:
        schedule = Schedule(budget_s=budget_s, longest_s=job.longest_s)
        job.plan(schedule)
        return schedule

    @property
    def paths(self) -> int:
        """How many paths will be measured."""
        return sum(isinstance(job, PathProbe) for job in self._jobs)

    @property
    def sweeps(self) -> int:
        """How many sets of nodes will be swept, once from every initiator."""
        return sum(isinstance(job, SweepProbe) for job in self._jobs)

    @property
    def copies(self) -> int:
        """How many pairs of GPU and node will be measured."""
        return sum(job.pairs for job in self._jobs if isinstance(job, CopyProbe))

    @property
    def expected_s(self) -> float:
        """Seconds that it takes on a machine that does nothing else."""
        return sum(schedule.expected_s for schedule in self._schedules)

    @property
    def longest_s(self) -> float:
        """Seconds after which no further number is begun."""
        return sum(schedule.budget_s for schedule in self._schedules if len(schedule) > 0)

    def run(self, progress: Progress | None = None) -> Profile:
        """Measures. Nothing else should run meanwhile: it would lower medians, widen spreads.

        Parameters
        ----------
        progress
            Called before every step.

        Raises
        ------
        PlacementError
            Buffers are not where they should be.
        MemoryError, OSError
            From the allocator or the kernel.
        """
        began = time.monotonic()
        found = self._measure(progress)
        seconds = time.monotonic() - began
        _log.info("measured %d paths, %d sweeps in %.1f s", self.paths, self.sweeps, seconds)
        return Profile(
            machine=self._fingerprint,
            date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            measured=True,
            mode=self._mode.mode,
            seconds=round(seconds, 3),
            paths=tuple(found.paths),
            sweeps=tuple(found.sweeps),
            copies=tuple(found.copies),
            gpus=tuple(found.gpus),
            notes=tuple(found.notes),
        )

    def _measure(self, progress: Progress | None) -> Findings:
        total = sum(map(len, self._schedules))
        done = 0

        def tell(label: str) -> None:
            nonlocal done
            if progress is not None:
                progress(label, done, total)
            done += 1

        found = Findings()
        for job, schedule in zip(self._jobs, self._schedules, strict=True):
            try:
                skipped = schedule.run(tell)
            finally:
                job.close()
                self._session.trim()
            job.collect(skipped, found)
        if progress is not None:
            progress("done", total, total)
        return found


# Many parameters: by keyword only, each with a default.
def measure_machine(
    session: Allocator,
    *,
    mode: Effort = FULL,
    seconds_per_path: float | None = None,
    nodes: Sequence[int] | None = None,
    initiators: Sequence[int] | None = None,
    interleaves: Sequence[tuple[int, ...]] | None = None,
    working_set_bytes: int | None = None,
    gpus: Gpus | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measure the memory of this machine: a :class:`Measurement`, made at once.

    Parameters and errors are those of :class:`Measurement` and of :meth:`Measurement.run`.
    """
    planned = Measurement(
        session,
        mode=mode,
        seconds_per_path=seconds_per_path,
        nodes=nodes,
        initiators=initiators,
        interleaves=interleaves,
        working_set_bytes=working_set_bytes,
        gpus=gpus,
    )
    return planned.run(progress)


def quick(
    session: Allocator,
    seconds: float = 4.0,
    *,
    nodes: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Load and store bandwidth and idle latency of every node, from the machine's initiator.

    ``quick(session).rates()`` gives one :class:`~cxl_offload.profile.NodeRates` a node.

    Parameters
    ----------
    session
        As for :func:`measure_machine`.
    seconds
        The most, shared by the nodes; one node takes about two when the machine is idle. What
        there is no time for is left out, and notes say so.
    nodes, progress
        As for :func:`measure_machine`.

    Raises
    ------
    ValueError, PlacementError, MemoryError, OSError
        As :func:`measure_machine`.
    """
    refuse_simulated(session)
    count = len(targets_of(session.machine, nodes))
    return measure_machine(
        session,
        mode=RATES,
        seconds_per_path=seconds / count,
        nodes=nodes,
        initiators=[session.machine.initiator],
        progress=progress,
    )
