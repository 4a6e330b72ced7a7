"""What transformers and safetensors raise over a file that is wrong, as one line that names it."""

from __future__ import annotations

import logging
import pickle
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from cxl_offload.errors import ConfigError, CxlOffloadError

UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
    AssertionError,
    *(ImportError, RuntimeError, EOFError, struct.error),  # too deep is a RuntimeError
    *(SafetensorError, StrictDataclassError, pickle.UnpicklingError),
)
"""What code raises that takes for granted what a file says."""

_PACKAGE = __name__.partition(".")[0]
_LOADER = logging.getLogger("transformers.modeling_utils")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MISMATCH = " MISMATCH "
"""What transformers' report calls a weight that has another shape in the file."""
_RAISED = "Error: "
"""Stands in the report's first line that says what an operation on weights raised."""


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """Makes a ConfigError of what the libraries raise in the block, with ``path`` or the file that
    is broken.

    An error that code of this package raises in there passes as it is: it is no fault of the file.
    """
    try:
        yield
    except CxlOffloadError:
        raise
    except UNREADABLE as error:
        if _is_ours(error.__traceback__):
            raise
        raise ConfigError(f"{_broken_file(path, error)}: {first_line(error)}") from error


@contextmanager
def unloadable(path: Path) -> Iterator[None]:
    """:func:`unreadable` of a model's weights, without transformers' report of many lines."""
    held = KeptWarnings(_LOADER)
    held.begin()
    try:
        with unreadable(path):
            yield
    except ConfigError as error:
        if (unlike := held.first(_MISMATCH)) and isinstance(error.__cause__, RuntimeError):
            raise ConfigError(
                f"{path}: the weights are not those that config.json describes: {unlike}"
            ) from error
        if (said := held.first(_RAISED)) and isinstance(error.__cause__, RuntimeError):
            raise ConfigError(f"{path}: {said}") from error
        raise
    else:
        held.end()
        held.tell()
    finally:
        held.end()


class KeptWarnings(logging.Filter):
    """Keeps a logger's warnings back until it is known that they are not of an error."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger, self._wanted = logger, logger.level
        self._records: list[logging.LogRecord] = []

    def begin(self) -> None:
        """Keep them back from now on."""
        # An error is in a warning. A level of its own is set only where warnings are off: with one
        # the loader says of every layer that no rank has a part of it.
        if not self._logger.isEnabledFor(logging.WARNING):
            self._logger.setLevel(logging.WARNING)
        self._logger.addFilter(self)

    def end(self) -> None:
        """Let new ones pass; more than once is as once."""
        self._logger.removeFilter(self)
        self._logger.setLevel(self._wanted)

    def filter(self, record: logging.LogRecord) -> bool:
        self._records.append(record)
        return False

    def tell(self) -> None:
        """Say what was kept back, as far as the logger says such."""
        for record in self._records:
            if self._logger.isEnabledFor(record.levelno):
                self._logger.handle(record)

    def first(self, word: str) -> str | None:
        """The first line with a word, without its colours."""
        for record in self._records:
            for line in record.getMessage().splitlines():
                if word in line:
                    return " ".join(_COLOURS.sub("", line).split())
        return None


def first_line(error: BaseException) -> str:
    """Of what an error says, with the next one where it only leads to that; or its name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if isinstance(error, KeyError):
        said = str(error.args[0])
        return said if " " in said else f"has no {lines[0]}"
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def _is_ours(traceback: TracebackType | None) -> bool:
    """Whether code of this package raised it, which the libraries had called."""
    modules = []
    while traceback is not None:
        modules.append(str(traceback.tb_frame.f_globals.get("__name__", "")))
        traceback = traceback.tb_next
    # The first is this one; then comes who loads, and calls the libraries.
    called = iter(module.partition(".")[0] == _PACKAGE for module in modules)
    is_within = False
    for is_own in called:
        if is_own and is_within:
            return True
        is_within = is_within or not is_own
    return False


def _broken_file(path: Path, error: Exception) -> Path:
    if isinstance(error, SafetensorError):
        for file in sorted(path.glob("*.safetensors")):
            try:
                with safe_open(file, framework="pt"):
                    pass
            except (OSError, SafetensorError):
                return file
    return path
