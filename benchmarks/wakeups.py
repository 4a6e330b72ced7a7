"""How often threads sleep and wake: parallel regions and barriers of a step, counted by the kernel.

A thread that waits at a barrier of OpenMP spins for milliseconds before it sleeps, so the kernel
sees little of it. With :data:`PASSIVE` in the environment, which OpenMP reads when it is loaded, it
sleeps at once, and ``voluntary_ctxt_switches`` of every thread counts its sleeps. Runs of two
lengths are counted: the difference is what the steps cost, without what a run costs.

GCC's OpenMP has two barriers a parallel region: all threads wait for each other at its end, and
then the workers wait for the next one. The last thread to come does not sleep, so N threads sleep
2 (N - 1) times a region. Which of them comes last differs from run to run, their sum does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
_FIELD = "voluntary_ctxt_switches:"

Sleeps = Mapping[int, int]
"""Of every thread, by its number."""


@dataclass(frozen=True)
class Wakeups:
    """Of one step."""

    regions: float
    """Parallel regions of OpenMP, and jobs of two threads of our own."""
    wakeups: float
    """Of all threads: how often one sleeps at a barrier, and is woken."""
    workers: float
    """Of them, those of all threads but the main one; who comes last at a barrier is chance."""
    busiest: float
    """Of the worker that slept most: one to two a region."""
    main: float
    """Barriers at which the main thread waits."""


def is_passive() -> bool:
    """Whether this process was started with what makes threads sleep at once."""
    return all(os.environ.get(name) == value for name, value in PASSIVE.items())


def sleeps(pid: int) -> dict[int, int]:
    """How often each thread of a process has gone to sleep since it began."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            text = (task / "status").read_text(encoding="utf-8")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        found[int(task.name)] = int(text.partition(_FIELD)[2].split()[0])
    return found


def added(before: Sleeps, after: Sleeps) -> dict[int, int]:
    """Sleeps between two looks, of the threads that are there at the end."""
    return {thread: count - before.get(thread, 0) for thread, count in after.items()}


def per_step(short: Sleeps, long: Sleeps, *, steps: int, main: int, threads: int) -> Wakeups:
    """What each of ``steps`` costs by which the long run is longer.

    Raises
    ------
    ValueError
        Fewer than two threads compute: there are no barriers.
    """
    if threads < 2:
        raise ValueError(f"{threads} thread has no barriers to count; ask for at least 2")
    cost = {thread: count / steps for thread, count in added(short, long).items()}
    workers = [count for thread, count in cost.items() if thread != main]
    wakeups = sum(cost.values())
    return Wakeups(
        regions=wakeups / (2 * (threads - 1)),
        wakeups=wakeups,
        workers=sum(workers),
        busiest=max(workers, default=0.0),
        main=cost[main],
    )


def wakeups_of(step: Callable[[], object], *, threads: int, lengths: tuple[int, int]) -> Wakeups:
    """Of a step of this process, which is repeated as often as the two lengths say."""
    pid = os.getpid()
    runs = []
    step()  # starts threads, and makes what the first step makes
    for length in lengths:
        before = sleeps(pid)
        for _ in range(length):
            step()
        runs.append(added(before, sleeps(pid)))
    return per_step(*runs, steps=lengths[1] - lengths[0], main=pid, threads=threads)
