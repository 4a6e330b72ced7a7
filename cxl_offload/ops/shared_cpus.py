"""Where other programs want the CPUs, threads of OpenMP that wait sleep instead of spin."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator

from cxl_offload import _C

_WORTH_A_NOTE = 0.05
"""Of the time: less is a moment in which something else ran, as on every machine."""

_known: weakref.ref[_C.SharedCpus] | None = None
"""The watch of the process; gone when no block needs it any more."""


def _watch() -> _C.SharedCpus:
    global _known
    found = None if _known is None else _known()
    if found is None:  # two threads that come here at once have a watch each, which does no harm
        found = _C.SharedCpus()
        _known = weakref.ref(found)
    return found


class SharedCpus:
    """What was seen since a block of :func:`share_cpus` began; also after its end.

    Without a block it lasts until :meth:`end`, or until it is dropped.

    Attributes
    ----------
    seconds
        How long the block lasts, or lasted.
    sleeping_seconds
        For how long of it other programs wanted the CPUs, so that waiting threads slept.
    """

    def __init__(self) -> None:
        self._watch: _C.SharedCpus | None = _watch()
        self._began, self._slept = time.perf_counter(), self._watch.sleeping_seconds
        self._seen = (0.0, 0.0)

    @property
    def seconds(self) -> float:
        return self._now()[0]

    @property
    def sleeping_seconds(self) -> float:
        return self._now()[1]

    def _now(self) -> tuple[float, float]:
        if self._watch is not None:
            slept = self._watch.sleeping_seconds - self._slept
            self._seen = (time.perf_counter() - self._began, slept)
        return self._seen

    def end(self) -> None:
        """Ends what this counts, as leaving the block does; does nothing the second time."""
        self._now()
        self._watch = None

    def notes(self) -> tuple[str, ...]:
        """A line for a report, where other programs took a part of the time that can be seen."""
        seconds, sleeping = self._now()
        if sleeping < _WORTH_A_NOTE * seconds:
            return ()
        return (
            f"other programs wanted this one's CPUs for {sleeping:.1f} of {seconds:.1f} s, so it "
            "was slower than on a quiet machine",
        )


@contextlib.contextmanager
def share_cpus() -> Iterator[SharedCpus]:
    """Let OpenMP's waiting threads sleep while other programs want the CPUs, in the whole process.

    Between two parallel operations, and at the end of each, threads of OpenMP wait for each other;
    GNU's OpenMP, which torch's packages from PyPI have, lets them spin for some milliseconds first.
    On CPUs of its own a program is fastest so. Where another program wants a CPU, a thread that
    spins keeps it from the thread that all wait for, at every operation. In the block a thread
    looks 20 times a second how long the threads of this process wait for a CPU
    (``/proc/self/task/*/schedstat``). While one does for a fifth of the time, waiting threads
    sleep at once; they spin again when all have had a CPU for half a second, and for longer after
    each time that this was too early. ``generate``, ``flexgen``, the blocks of
    :func:`cxl_offload.integrations.transformers.offload` and training in placed engines of
    DeepSpeed are such blocks already. Blocks may be nested, and entered by several threads.

    Does nothing where ``OMP_WAIT_POLICY`` or ``GOMP_SPINCOUNT`` is set, OpenMP is another (LLVM's,
    Intel's), there is one CPU, the kernel does not count waits, or in a forked child.

    Yields
    ------
    SharedCpus
        For how long others wanted the CPUs.
    """
    shared = SharedCpus()
    try:
        yield shared
    finally:
        shared.end()
