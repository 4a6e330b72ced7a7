"""The file from which a tuner goes on after a restart."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from cxl_offload.errors import ConfigError
from cxl_offload.files.text import parse_json, read_text, write_text

DAMAGED = (ArithmeticError, AttributeError, KeyError, TypeError, ValueError)
"""What reading a state raises where it has other things than were saved: an endless number too."""

_LOG = logging.getLogger(__name__)


def damage(problem: BaseException) -> str:
    """What an error of :data:`DAMAGED` says of a file, for people."""
    if isinstance(problem, KeyError):
        return f"{problem} is missing"
    return str(problem) or type(problem).__name__


def read_state(path: Path | None) -> dict[str, Any] | None:
    """What was saved in the file, or None if there is no file.

    Raises
    ------
    ConfigError
        The file is damaged, or its folder is not there.
    """
    if path is None:
        return None
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: its folder is not there; make it, or name another file")
    if not path.exists():
        return None
    try:
        saved: Any = parse_json(read_text(path))
    except ConfigError as problem:
        raise ConfigError(f"{path}: not a saved state of a tuner ({problem})") from problem
    if not isinstance(saved, dict):
        raise ConfigError(f"{path}: not a saved state of a tuner (no mapping)")
    return saved


def write_state(path: Path, saved: dict[str, Any]) -> None:
    """Replaces the old state by a new one, in one step.

    If that fails, it only logs a warning, because a step of training is worth more than the state.
    """
    try:
        write_text(path, json.dumps(saved))
    except OSError as problem:
        _LOG.warning("tune: the state stays unsaved: %s", problem)
