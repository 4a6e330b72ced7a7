"""Errors of the package: each names the call, the value, the limit and the remedy.

Out of memory is ``MemoryError``, a refused system call ``OSError`` and a bad argument
``ValueError``, so that callers need no class of ours to handle what Python already names.
"""

from __future__ import annotations

_LONGEST = 1600


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


def printable(text: str) -> str:
    """A text on one line, in which nothing writes to a terminal but letters."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _one_line(text: str) -> str:
    text = printable(text)
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters) ... {text[-half:]}"
