"""Profiles as JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cxl_offload.errors import ConfigError
from cxl_offload.profile.codec import DecodeError, Where, decode, encode
from cxl_offload.profile.fingerprint import check_same_machine
from cxl_offload.profile.model import PROFILE_VERSION, Profile
from cxl_offload.profile.operators.model import OPERATORS_VERSION
from cxl_offload.topology import Machine
from cxl_offload.topology.document import Field, read_document

__all__ = ["load_profile", "parse_profile", "profile_text", "save_profile"]


def profile_text(profile: Profile) -> str:
    """The JSON text of a profile."""
    return json.dumps(encode(profile), indent=1, allow_nan=False) + "\n"


def save_profile(profile: Profile, path: str | Path) -> None:
    """Writes a profile; a file of that name is replaced as a whole or not at all.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    target = Path(path)
    beside = target.with_name(target.name + ".part")
    beside.write_text(profile_text(profile), encoding="utf-8")
    beside.replace(target)


def load_profile(path: str | Path, *, machine: Machine | None = None) -> Profile:
    """The profile of a file.

    Parameters
    ----------
    machine
        The running machine (:func:`cxl_offload.topology.discover`): a profile of another one is
        refused. Without it any profile is read.

    Raises
    ------
    ConfigError
        With file, line and key: the file cannot be read, is not JSON, has another version, or a
        key is unknown, missing or wrong; or it is of another machine than ``machine``.
    """
    file = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read: {error.strerror}", file=file) from error
    except UnicodeDecodeError as error:
        raise ConfigError("is not UTF-8 text", file=file) from error
    profile = parse_profile(text, file=file)
    if machine is not None:
        check_same_machine(profile, machine, file=file)
    return profile


def parse_profile(text: str, *, file: str) -> Profile:
    """The profile of a JSON text; ``file`` is for messages.

    Raises
    ------
    ConfigError
        As :func:`load_profile`.
    """
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error.msg}", file=file, line=error.lineno) from error
    except DecodeError as error:
        raise ConfigError(str(error), file=file) from error
    try:
        _check_version(value)
        return decode(Profile, value)
    except DecodeError as error:
        line = _line_of(text, file, error.where)
        raise ConfigError(str(error), file=file, line=line) from error


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise DecodeError(f"key {twice!r} appears twice", ())
    return entries


def _no_constant(name: str) -> float:
    raise DecodeError(f"{name} is not a number that JSON knows", ())


def _check_version(value: Any) -> None:
    """Before anything else: other versions have other keys."""
    if not isinstance(value, dict) or "version" not in value:
        raise DecodeError("is not a profile: key 'version' is missing", ())
    if value["version"] != PROFILE_VERSION:
        raise DecodeError(
            f"profile version {value['version']!r}: this program reads version "
            f"{PROFILE_VERSION}; measure again with `cxl-offload profile`",
            ("version",),
        )
    for at, each in enumerate(value.get("operators") or ()):
        found = each.get("version", 1) if isinstance(each, dict) else OPERATORS_VERSION
        if found != OPERATORS_VERSION:
            raise DecodeError(
                f"operators of version {found!r}: this program reads version {OPERATORS_VERSION}; "
                "measure again with `cxl-offload profile --operators`",
                ("operators", at),
            )


def _line_of(text: str, file: str, where: Where) -> int | None:
    """The line of a place in a JSON text, which is YAML too; of its nearest parent if it is new."""
    try:
        field = read_document(text, file=file)
        for part in where:
            field = _step(field, part)
    except (ConfigError, LookupError):
        return None
    return field.line


def _step(field: Field, part: str | int) -> Field:
    return field.items()[part] if isinstance(part, int) else field.entries()[part]
