"""Errors of the package: each names the call, the value, the limit and the remedy.

Out of memory is ``MemoryError``, a refused system call ``OSError`` and a bad argument
``ValueError``, so that callers need no class of ours to handle what Python already names.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_LONGEST = 1600
MOST_NAMED = 4


class CxlOffloadError(Exception):
    """Base of the errors that only this package can raise."""


class PlacementError(CxlOffloadError, RuntimeError):
    """Memory was granted somewhere else than asked and the caller wanted to know (strict)."""


class ConfigError(CxlOffloadError, ValueError):
    """A configuration file or command line is wrong.

    Parameters
    ----------
    message
        What is wrong, with the offending value and what would be right. It is shown on one line:
        what cannot be printed, such as a line break inside of a value, is escaped, and the middle
        of very long ones is left out.
    file, line
        Where, as far as known. ``line`` counts from 1.
    """

    def __init__(self, message: str, *, file: str | None = None, line: int | None = None) -> None:
        where = "" if file is None else f"{file}:{line}: " if line is not None else f"{file}: "
        super().__init__(_one_line(f"{where}{message}"))
        self.file = file
        self.line = line


@dataclass(frozen=True, slots=True)
class LostMemory:
    """Bytes that are gone because the memory under them failed.

    Attributes
    ----------
    name
        What lay there, such as ``exp_avg of parameter 3``; else the allocation in words.
    offset, nbytes
        Which bytes of it.
    node
        Where they had been placed; None where that is not known.
    address
        Of the first byte, in this process.
    """

    name: str
    offset: int
    nbytes: int
    node: int | None
    address: int

    def __str__(self) -> str:
        where = "" if self.node is None else f" on node {self.node}"
        return f"bytes {self.offset} to {self.offset + self.nbytes - 1} of {self.name}{where}"


class MemoryLostError(CxlOffloadError, RuntimeError):
    """Memory failed, and what lay there is gone.

    Attributes
    ----------
    losses
        What is gone, as far as it is known.
    is_whole
        Whether all of it was written anew since, such as weights from their file: what failed may
        be done once more.
    reason
        What is known where no loss can be named.
    """

    def __init__(
        self, losses: Sequence[LostMemory] | str, *, is_whole: bool = False, reason: str = ""
    ) -> None:
        if isinstance(losses, str):  # torch makes the errors of workers again from their text
            reason, losses = losses, ()
        super().__init__(_one_line(f"memory failed: {reason or _said_of(losses, is_whole)}"))
        self.losses = tuple(losses)
        self.is_whole = is_whole

    def __reduce__(self) -> tuple[Any, ...]:
        return _lost_again, (self.losses, self.is_whole, str(self))


def _lost_again(losses: Sequence[LostMemory], is_whole: bool, said: str) -> MemoryLostError:
    """The error of another process, in its own words."""
    error = MemoryLostError(losses, is_whole=is_whole)
    error.args = (said,)
    return error


def _said_of(losses: Sequence[LostMemory], is_whole: bool) -> str:
    named = "; ".join(map(str, losses[:MOST_NAMED]))
    if len(losses) > MOST_NAMED:
        named += f"; and {len(losses) - MOST_NAMED} more"
    remedy = (
        "they were written anew, so do this once more"
        if is_whole
        else "write them anew, from a checkpoint or by computing them again, or start again"
    )
    return f"{named} are lost; {remedy}"


def printable(text: str) -> str:
    """A text on one line, in which nothing writes to a terminal but letters."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _one_line(text: str) -> str:
    text = printable(text)
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters) ... {text[-half:]}"


def forget_locals(error: BaseException) -> None:
    """Drops what the frames of an exception still hold, tensors above all."""
    for each in _chain(error):
        traceback.clear_frames(each.__traceback__)


def forget_frames(error: BaseException) -> None:
    """Drops the frames of an exception too: their functions keep what they close over, and torch
    closes over the arguments of a module's call, with a cache among them, where it has hooks."""
    for each in _chain(error):
        each.__traceback__ = None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, and those that it came from."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
