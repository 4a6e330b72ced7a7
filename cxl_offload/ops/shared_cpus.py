"""Where other programs want the CPUs, threads of OpenMP that wait sleep instead of spin."""

from __future__ import annotations

import weakref
from time import perf_counter
from types import TracebackType

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
    """A block of :func:`share_cpus`, and what was seen since it began; also after its end.

    Attributes
    ----------
    seconds
        How long the block lasts, or lasted; 0 before it.
    sleeping_seconds
        For how long of it other programs wanted the CPUs, so that waiting threads slept. 0 in a
        forked child.
    why_off
        Why the block does nothing, such as ``GOMP_SPINCOUNT is set``; empty where it works, and
        before it.
    """

    __slots__ = ("_began", "_seen", "_slept", "_watch", "_why_off")

    def __init__(self) -> None:
        self._watch: _C.SharedCpus | None = None
        self._began: float | None = None
        self._slept = 0.0
        self._seen = (0.0, 0.0)
        self._why_off = ""

    def __repr__(self) -> str:
        if self.why_off:
            return f"<share_cpus(): does nothing, since {self.why_off}>"
        seconds, sleeping = self._now()
        return f"<share_cpus(): wanted by others for {sleeping:.1f} of {seconds:.1f} s>"

    def __enter__(self) -> SharedCpus:
        if self._began is not None:
            raise RuntimeError("this block of share_cpus() has begun already; call it for another")
        self._watch = _watch()
        self._slept = self._watch.sleeping_seconds
        self._began = perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    @property
    def seconds(self) -> float:
        return self._now()[0]

    @property
    def sleeping_seconds(self) -> float:
        return self._now()[1]

    @property
    def why_off(self) -> str:
        watch = self._watch
        if watch is not None:
            self._why_off = watch.why_off
        return self._why_off

    def _now(self) -> tuple[float, float]:
        watch = self._watch  # once: another thread may end the block meanwhile
        if watch is not None and self._began is not None:
            slept = watch.sleeping_seconds - self._slept
            seconds = perf_counter() - self._began
            self._seen = (seconds, min(max(slept, 0.0), seconds))
        return self._seen

    def end(self) -> None:
        """Ends the block, as leaving it does; does nothing the second time."""
        self._seen, self._why_off = self._now(), self.why_off
        self._watch = None

    def notes(self) -> tuple[str, ...]:
        """A line for a report, where other programs took a part of the time that can be seen."""
        seconds, sleeping = self._now()
        if sleeping < _WORTH_A_NOTE * seconds or not sleeping:
            return ()
        return (
            f"other programs wanted this one's CPUs for {sleeping:.1f} of {seconds:.1f} s, so it "
            "was slower than on a quiet machine",
        )


def share_cpus() -> SharedCpus:
    """Let OpenMP's waiting threads sleep while other programs want the CPUs, in the whole process.

    Between two parallel operations, and at the end of each, threads of OpenMP wait for each other;
    GNU's OpenMP, which torch's packages from PyPI have, lets them spin for some milliseconds first.
    On CPUs of its own a program is fastest so. Where another program wants a CPU, a thread that
    spins keeps it from the thread that all wait for, at every operation. In the block a thread
    looks 20 times a second how long the threads of this process wait for a CPU
    (``/proc/self/task/*/schedstat``). When one of them waited for a fifth of the time, twice in a
    row, waiting threads sleep at once. They spin again when for half a second none has waited for
    a tenth of the time, and for longer after each time that this was too early. ``generate``,
    ``flexgen``, the blocks of :func:`cxl_offload.integrations.transformers.offload` and training in
    placed engines of DeepSpeed are such blocks already. Blocks may be nested, and entered by
    several threads.

    Does nothing where ``OMP_WAIT_POLICY``, ``GOMP_SPINCOUNT`` or ``OMP_STACKSIZE`` is set, OpenMP
    is another (LLVM's, Intel's) or may not make a thread more than there are CPUs, there is one
    CPU, the kernel does not count waits, the process has no room for more threads, or in a process
    that was forked and has not started a program since. ``why_off`` of the block says which.

    Returns
    -------
    SharedCpus
        For ``with``, once.

    Raises
    ------
    RuntimeError
        In ``with``: the block has begun already.
    """
    return SharedCpus()
