"""Text files: read and decoded with errors that name file and line, replaced as a whole."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from cxl_offload.errors import ConfigError
from cxl_offload.files.codec import DecodeError, decode
from cxl_offload.files.document import Field, shown

T = TypeVar("T")

_JSON = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file.

    Raises
    ------
    ConfigError
        The file cannot be read, is not UTF-8, or is a device or a pipe that nobody writes to.
    """
    try:
        # Opening a pipe would wait for somebody to write to it; devices have no end.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(file, encoding="utf-8") as opened:
            if stat.S_ISCHR(os.fstat(file).st_mode) and not opened.isatty():
                raise ConfigError("is a device, not a file", file=str(path))
            os.set_blocking(file, True)
            return opened.read()
    except ConfigError:  # a ValueError too
        raise
    except OSError as error:
        raise ConfigError(f"cannot read: {error.strerror}", file=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError("is not UTF-8 text", file=str(path)) from error
    except ValueError as error:  # Python's word for a NUL in a name
        raise ConfigError(f"no name of a file: {error}", file=str(path)) from error


def read_json_lines(
    path: str | os.PathLike[str], make: Callable[[dict[str, Any]], T], wanted: str
) -> list[T]:
    """What ``make`` makes of the object of each line; empty lines are left out.

    Parameters
    ----------
    make
        Raises KeyError, TypeError or ValueError for an object that is wrong.
    wanted
        What lines are to have, for messages.

    Raises
    ------
    ConfigError
        As :func:`read_text`; and with file and line, where one is no object or ``make`` raises.
    """
    made = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise TypeError(f"this is {shown(entry)}")
            made.append(make(entry))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            said = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(
                f"want JSON with {wanted}: {said}", file=str(path), line=number
            ) from None
    return made


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file; one of that name is replaced as a whole or not at all.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """:func:`write_text` of bytes."""
    target = Path(path)
    try:
        if _is_written_to(target):
            _write_to(target, content)
            return
        target = Path(os.path.realpath(target))  # a link stays one
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, "may not be written")
        beside = target.with_name(f"{target.name}.{threading.get_native_id()}.part")
        try:
            beside.write_bytes(content)
            if target.exists():
                shutil.copymode(target, beside)
            beside.replace(target)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def why_not_writable(path: str | os.PathLike[str]) -> str | None:
    """Why :func:`write_text` would fail, as far as that is known before; None where it would not.

    A named pipe counts: whether somebody reads it is known only when it is opened.
    """
    if not os.fspath(path):
        return "the name of the file is empty"
    try:
        if _is_of_kernel(Path(path)):  # /dev/stdout leads to a file, a terminal or a shell's pipe
            return None if os.access(path, os.W_OK) else "cannot be written"
        target = os.path.realpath(path)
        folder = os.path.dirname(target)
        if not os.path.isdir(folder):
            return f"there is no folder {folder}"
        try:
            mode = os.stat(target).st_mode
        except FileNotFoundError:
            may_write = os.access(folder, os.W_OK | os.X_OK)
        else:
            if kind := _other_kind(mode):
                return f"is a {kind}, not a file"
            may_write = os.access(folder, os.W_OK | os.X_OK) and os.access(target, os.W_OK)
        if not may_write:
            return "cannot be written"
        room = os.statvfs(folder)
        return f"no space is left in {folder}" if room.f_blocks and not room.f_bavail else None
    except OSError as error:
        return str(error.strerror)
    except ValueError as error:  # Python's word for a NUL in a name
        return f"no name of a file: {error}"


def _other_kind(mode: int) -> str | None:
    """What something is called that is not a file; None where it is one."""
    if stat.S_ISREG(mode):
        return None
    if stat.S_ISDIR(mode):
        return "folder"
    return "pipe" if stat.S_ISFIFO(mode) else "device or socket"


def _is_of_kernel(target: Path) -> bool:
    names = target.parts
    return names[:2] in (("/", "dev"), ("/", "proc")) and names[:3] != ("/", "dev", "shm")


def _is_written_to(target: Path) -> bool:
    """Whether it is no file of its own: a pipe, a device, ``/dev/stdout`` wherever that leads."""
    return _is_of_kernel(target) or (target.exists() and not target.is_file())


def _write_to(target: Path, content: bytes) -> None:
    """Never waits for a pipe's reader."""
    try:
        file = os.open(target, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "nobody reads this pipe") from None
        raise
    with open(file, "wb") as opened:
        os.set_blocking(file, True)
        opened.write(content)


def parse_json(text: str, *, file: str | None = None) -> Any:
    """The value of a JSON text, without what JSON forbids: keys that come twice, NaN, infinity;
    nor numbers that only infinity stands for.

    Raises
    ------
    ConfigError
        With file and line where it is known.
    """
    try:
        return json.loads(
            text,
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error.msg}", file=file, line=error.lineno) from error
    except DecodeError as error:
        raise ConfigError(str(error), file=file) from error
    except RecursionError as error:
        raise ConfigError("not JSON: nested too deeply", file=file) from error
    except ValueError as error:  # Python's limit of digits
        raise ConfigError("not JSON: a number with thousands of digits", file=file) from error


def decode_json(
    kind: type[T], text: str, *, file: str | None = None, check: Callable[[Any], None] | None = None
) -> T:
    """The ``kind`` (a dataclass) of a JSON text.

    Parameters
    ----------
    check
        Sees the value first, and raises :class:`DecodeError` for one of another version.

    Raises
    ------
    ConfigError
        With file, line and key, for anything unknown, missing, twice there or of the wrong kind.
    """
    value = parse_json(text, file=file)
    try:
        if check is not None:
            check(value)
        return decode(kind, value)
    except DecodeError as error:
        raise ConfigError(str(error), file=file, line=_line_of(text, error.where)) from error


def _line_of(text: str, where: Iterable[str | int]) -> int:
    """The line of what keys and list indices lead to in a JSON text, as far as that goes.

    An entry's line is that of its key, as :class:`Field` has it. Nothing behind it is read.
    """
    entry = value = _behind_space(text, 0)
    for step in where:
        found = _entry(text, value, step)
        if found is None:
            break
        entry, value = found
    return text.count("\n", 0, entry) + 1


def _entry(text: str, at: int, step: str | int) -> tuple[int, int] | None:
    """Where an entry of the mapping or list at ``at`` begins, and where its value does."""
    if text[at] != ("[" if isinstance(step, int) else "{"):
        return None
    entry, count = _behind_space(text, at + 1), 0
    while text[entry] not in "]}":
        key: Any = count
        value = entry
        if text[at] == "{":
            key, end = _JSON.raw_decode(text, entry)
            value = _behind_space(text, _behind_space(text, end) + len(":"))
        if key == step:
            return entry, value
        end = _behind_space(text, _JSON.raw_decode(text, value)[1])
        entry = _behind_space(text, end + len(",")) if text[end] == "," else end
        count += 1
    return None


def _behind_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return at if space is None else space.end()


def decode_document(kind: type[T], root: Field) -> T:
    """The ``kind`` (a dataclass) of a YAML document.

    Raises
    ------
    ConfigError
        As :func:`decode_json`.
    """
    try:
        return decode(kind, root.value())
    except DecodeError as error:
        line = root.nearest(error.where).line
        raise ConfigError(str(error), file=root.file, line=line) from error


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise DecodeError(f"key {shown(twice)} appears twice", ())
    return entries


def _finite(digits: str) -> float:
    """Python reads 1e999 as infinity, which is written as no JSON."""
    number = float(digits)
    if math.isinf(number):
        raise DecodeError(f"{digits[:20]} is larger than any number here", ())
    return number


def _no_constant(name: str) -> float:
    raise DecodeError(f"{name} is not a number that JSON knows", ())
