"""Memory that breaks: what was lost, what it was, and who can have it again.

The core replaces lost pages and writes them down (``csrc/os/memory_failure.h``); here they get
names, owners and an error. See docs/reliability.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, Protocol

from cxl_offload import _C
from cxl_offload.core import LINE_BYTES
from cxl_offload.errors import LostMemory, MemoryLostError
from cxl_offload.memory.bounds import check_size, quoted
from cxl_offload.memory.copies import restored_from_copy
from cxl_offload.units import format_bytes

_logger = logging.getLogger(__name__)
_LAST = (1 << 64) - 1

VARIABLE = "CXL_OFFLOAD_SURVIVE_MEMORY_ERRORS"
"""Environment variable: ``0`` leaves SIGBUS alone, also where the package would turn it on."""


class MemoryNamer(Protocol):
    """Who knows what lies in a range of memory."""

    def named(self, address: int) -> tuple[str, int] | None:
        """What lies at an address, in words, and where it begins; None: nothing of the namer's."""


class MemoryOwner(MemoryNamer, Protocol):
    """Who may be able to have it again."""

    def restore(self, address: int, nbytes: int) -> bool:
        """Writes lost bytes of the owner's anew; whether they are as they were."""

    @property
    def tells_itself(self) -> bool:
        """Whether the owner finds losses at its next use, so that nobody else need be told."""


_owners: weakref.WeakSet[Any] = weakref.WeakSet()
_namers: weakref.WeakSet[Any] = weakref.WeakSet()
_guard = _C.ForkGuard()
_told: set[int] = set()
_users = 0
_interrupting = 0
_listens = False
_python_handler: Any = None


def add_owner(owner: MemoryOwner) -> None:
    """Asks ``owner`` about lost memory, as long as it lives."""
    _owners.add(owner)


def add_namer(namer: MemoryNamer) -> None:
    """Names what lies in memory, as long as it lives, where no owner does."""
    _namers.add(namer)


class Survival:
    """Keeps the process alive when memory fails, until :meth:`stop` or the end of the process.

    A context manager: the end of the block stops it.
    """

    def __init__(self, *, interrupt: bool) -> None:
        global _users, _interrupting
        self._interrupts = interrupt
        _begin(interrupts=_interrupting > 0 or interrupt)
        _users += 1
        _interrupting += interrupt
        self._is_on = True

    def stop(self) -> None:
        """Leaves SIGBUS to who had it before, when nobody else wants to survive."""
        global _users, _interrupting
        if not self._is_on:
            return
        self._is_on = False
        _users -= 1
        _interrupting -= self._interrupts
        if _users == 0:
            _C.stop_surviving(prepare=_stop_listening if _listens and _in_main() else None)
        elif self._interrupts and _interrupting == 0:
            _begin(interrupts=False)

    def __enter__(self) -> Survival:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def survive_memory_errors(*, interrupt: bool = True) -> Survival:
    """From now on a page that the hardware loses ends an operation, not the process.

    A lost page of memory that this package placed is replaced by a fresh one full of ``0xff``,
    which is NaN in every float type. The package's own operators and copies then raise
    :class:`~cxl_offload.errors.MemoryLostError` instead of a result; whatever else the main thread
    does is interrupted by that error as soon as its present call returns. Memory of others is left
    to the handler of SIGBUS that was there before, or to the kernel, which ends the process.

    Parameters
    ----------
    interrupt
        Whether the main thread is interrupted, as long as anybody who turned it on wants that.
        False: losses show where the package's own operators use them, in the log, and in
        :meth:`~cxl_offload.memory.Session.lost`.

    Returns
    -------
    Survival
        Turns it off again: ``with survive_memory_errors(): ...``, or ``stop()``.

    Notes
    -----
    Call it in the main thread: from another one nobody is interrupted. Turn on ``faulthandler``
    before, since whoever takes SIGBUS later comes first. A forked child inherits it,
    but workers of a DataLoader begin with torch's handler: they ask again in ``worker_init_fn``.
    """
    return Survival(interrupt=bool(interrupt))


def may_survive() -> bool:
    """Whether :data:`VARIABLE` lets the package turn it on by itself."""
    return os.environ.get(VARIABLE, "1") != "0"


def survive_by_default() -> None:
    """:func:`survive_memory_errors` for good, where it :func:`may_survive`; once is enough."""
    if may_survive() and not survives():
        survive_memory_errors()


def survives() -> bool:
    """Whether lost pages are survived at this moment."""
    return _C.survives_memory_failures()


def _in_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _begin(*, interrupts: bool) -> None:
    """Only the main thread can ask Python to call something, and without it nobody is interrupted:
    Python ends a process that is to be interrupted by a signal without a handler."""
    listens = interrupts and (_listens or _in_main())
    prepare = _listen if listens and not _listens else None
    _C.survive_memory_failures(interrupts=listens, prepare=prepare)


def _listen() -> None:
    global _python_handler, _listens
    found = signal.signal(signal.SIGBUS, _on_bus_error)
    if found is not _on_bus_error:
        _python_handler = found
    _listens = True


def _stop_listening() -> None:
    global _listens
    signal.signal(signal.SIGBUS, _python_handler or signal.SIG_DFL)
    _listens = False


def _on_bus_error(number: int, frame: FrameType | None) -> None:
    """In the main thread, soon after the core replaced pages: between two steps of Python."""
    fresh = [row for row in _C.losses() if row[0] not in _told]
    if not fresh:
        if callable(_python_handler):
            _python_handler(number, frame)
        return
    error = _error_of([(address, nbytes) for _, address, nbytes, _ in fresh], spare_owners=True)
    if error is not None:
        raise error


def lost_error(reason: str, ranges: Sequence[tuple[int, int]]) -> MemoryLostError:
    """The error for parts of a call's memory, (address, bytes); the core raises it."""
    error = _error_of(ranges, spare_owners=False)
    return error or MemoryLostError([], reason=reason)


def _error_of(ranges: Iterable[tuple[int, int]], *, spare_owners: bool) -> MemoryLostError | None:
    """The error of lost ranges that are somebody's; owners may have written them anew."""
    losses: list[LostMemory] = []
    is_whole = True
    for address, nbytes in (piece for each in ranges for piece in _pieces(*each)):
        numbers = {row[0] for row in _C.losses_in(address, nbytes)}
        is_new = not numbers <= _told
        _told.update(numbers)
        lost = _describe(address, nbytes)
        if lost is None:
            _logger.info("memory failed: %s that nobody used", format_bytes(nbytes))
            _C.settle(address, nbytes)
            continue
        if is_new:
            _logger.error("memory failed: %s", lost)
        owner = _owner_of(address)
        if owner is not None and owner.tells_itself and spare_owners:
            continue
        losses.append(lost)
        is_whole = _restore(owner, address, nbytes) and is_whole
    return MemoryLostError(losses, is_whole=is_whole) if losses else None


def _pieces(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """A lost range cut where allocations begin and end: small ones share a page."""
    end = address + nbytes
    while address < end:
        held = _C.find_allocation(address)
        if held is not None:
            stop = min(end, held.address + held.nbytes)
        else:
            lines = range(address - address % LINE_BYTES + LINE_BYTES, end, LINE_BYTES)
            stop = next((at for at in lines if _C.find_allocation(at) is not None), end)
        yield address, stop - address
        address = stop


def _restore(owner: MemoryOwner | None, address: int, nbytes: int) -> bool:
    if restored_from_copy(address, nbytes):
        _C.settle(address, nbytes)
        _logger.warning("memory failed: %s were copied from another node", format_bytes(nbytes))
        return True
    if owner is None:
        return False
    try:
        done = owner.restore(address, nbytes)
    except (OSError, ValueError, RuntimeError) as error:
        _logger.error("memory failed: what was lost could not be had again: %s", error)
        return False
    if done:
        _C.settle(address, nbytes)
        _logger.warning("memory failed: %s were written anew", format_bytes(nbytes))
    return done


def _owner_of(address: int) -> MemoryOwner | None:
    return next((each for each in list(_owners) if each.named(address) is not None), None)


def in_words(allocation: _C.Allocation) -> str:
    """An allocation for people who do not know what it is for."""
    return f"an allocation of {format_bytes(allocation.nbytes)} ({allocation.requested})"


def name_of(address: int) -> tuple[str, int] | None:
    """What lies at an address and where it begins; None where nobody says."""
    found = None
    for each in (*list(_namers), *list(_owners)):
        found = each.named(address) or found
    return found


def _describe(address: int, nbytes: int) -> LostMemory | None:
    """What lay in a lost range; None where it is nobody's."""
    allocation = _C.find_allocation(address)
    node, name, begin = None, None, address
    if allocation is None and _guard.in_child:
        name = "memory of the parent process"
    if allocation is not None:
        begin = allocation.address
        name = in_words(allocation)
        within = min(nbytes, begin + allocation.nbytes - address)
        with contextlib.suppress(ValueError):  # an allocation of the parent of a forked process
            runs = allocation.runs(address - begin, within)
            node = runs[0][2] if runs else None
    name, begin = name_of(address) or (name, begin)
    return None if name is None else LostMemory(name, address - begin, nbytes, node, address)


def lost_memory() -> tuple[LostMemory, ...]:
    """What is lost and was not written anew, in all sessions of this process."""
    found = ((address, nbytes) for _, address, nbytes, _ in _C.losses())
    rows = [_describe(*piece) for each in found for piece in _pieces(*each)]
    return tuple(row for row in rows if row is not None)


def lost_ranges(address: int, nbytes: int) -> list[tuple[int, int]]:
    """(address, bytes) of what is lost in a range and was not written anew."""
    return [(begin, count) for _, begin, count, _ in _C.losses_in(address, nbytes)]


def is_lost(address: int, nbytes: int) -> bool:
    """Whether anything of a range is lost and was not written anew."""
    return bool(lost_ranges(address, nbytes))


def is_gone(address: int, nbytes: int) -> bool:
    """Whether the file or device behind a range was found to be cut or to have left.

    Its pages are then replaced one by one, as somebody uses them, by memory of a node.
    """
    return _C.any_loss() and any(
        kind == _C.LossKind.gone for *_, kind in _C.losses_in(address, nbytes)
    )


def written_anew(address: int, nbytes: int) -> None:
    """Tells that lost bytes were written again, by a program that knows how to have them.

    The package's own operators then use them as any others. What they write from end to end, and
    what is freed, needs no word.

    Raises
    ------
    TypeError, ValueError
        The address or the number of bytes is none.
    """
    check_size(address, "address", least=0)
    check_size(nbytes, "nbytes", least=0)
    if address + nbytes > _LAST:
        raise ValueError(
            f"nbytes {quoted(nbytes)} from address {quoted(address)} reach beyond the last address"
        )
    _C.settle(address, nbytes)
