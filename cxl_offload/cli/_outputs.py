"""The files that a command will write: checked before any work is done, and written after it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from cxl_offload.errors import ConfigError
from cxl_offload.files import why_not_writable

STDOUT = "-"
_MODEL_FILES = ("config.json", "tokenizer*", "*.safetensors*")
"""Of a folder that is read."""

NamedFiles = Mapping[str, "str | Path | None"]
"""Files by the option that names them; None where it was not given."""


def check_outputs(written: NamedFiles, read: NamedFiles | None = None) -> None:
    """Refuses files that could not be written, and those that would replace something of use.

    Parameters
    ----------
    written
        What the command will write; ``-`` is stdout.
    read
        Files and folders of models that it reads; names of what comes with the package do no harm.

    Raises
    ------
    ConfigError
        Names the option and the file, and says what is wrong: no name, no folder, a pipe, no room,
        the same file twice, or one that is read.
    """
    files = {
        option: os.fspath(file)
        for option, file in written.items()
        if file is not None and os.fspath(file) != STDOUT
    }
    if written.get("--output") is not None and os.fspath(written["--output"] or "") == STDOUT:
        raise ConfigError("--output -: it names a file; --json prints")
    for option, file in files.items():
        if reason := why_not_writable(file):
            raise ConfigError(f"{option} {file or repr(file)}: {reason}")
    seen: dict[str, str] = {}
    for option, file in files.items():
        if Path(file).is_char_device():  # a terminal, /dev/null
            continue
        if (other := seen.setdefault(os.path.realpath(file), option)) != option:
            raise ConfigError(f"{option} {file}: {other} writes the same file; name another")
    for option, source in (read or {}).items():
        if source is not None and not os.fspath(source):
            raise ConfigError(f"{option} '': the name of the file is empty")
        for each in () if source is None else _files_of(Path(source)):
            if writer := seen.get(os.path.realpath(each)):
                raise ConfigError(
                    f"{writer} {each}: {option} reads this file, which would be replaced; name "
                    "another"
                )


def outputs(as_json: bool, output: str | None) -> list[str]:
    """Where a report goes as JSON: a file, then ``-`` for stdout, whose reader may stop early."""
    return [*([] if output is None else [output]), *([STDOUT] if as_json else [])]


def _files_of(path: Path) -> list[Path]:
    try:
        if path.is_dir():
            return [each for pattern in _MODEL_FILES for each in path.glob(pattern)]
    except (OSError, ValueError):  # no name of a file: who reads it refuses it
        return []
    return [path]


def write_all(*writes: Callable[[], object]) -> None:
    """Writes every file also where one fails, and raises the first error then.

    What was computed for minutes is not lost to a full drive. What prints comes last: a reader such
    as ``head`` that has seen enough ends it.
    """
    first: OSError | None = None
    for write in writes:
        try:
            write()
        except OSError as error:
            first = first or error
    if first is not None:
        raise first
