"""Profiles as JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cxl_offload.files import DecodeError, decode_json, encode, read_text, write_text
from cxl_offload.profile.fingerprint import check_same_machine
from cxl_offload.profile.model import PROFILE_VERSION, Profile
from cxl_offload.profile.operators.model import OPERATORS_VERSION
from cxl_offload.topology import Machine


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
    write_text(path, profile_text(profile))


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
    profile = parse_profile(read_text(path), file=file)
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
    return decode_json(Profile, text, file=file, check=_check_version)


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
    operators = value.get("operators")
    for at, each in enumerate(operators if isinstance(operators, list) else ()):
        found = each.get("version", 1) if isinstance(each, dict) else OPERATORS_VERSION
        if found != OPERATORS_VERSION:
            raise DecodeError(
                f"operators of version {found!r}: this program reads version {OPERATORS_VERSION}; "
                "measure again with `cxl-offload profile --operators`",
                ("operators", at),
            )
