"""The file from which a tuner goes on after a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cxl_offload.errors import ConfigError
from cxl_offload.files.text import parse_json, read_text


def read_state(path: Path | None) -> dict[str, Any] | None:
    """What was saved there; None where nothing was.

    Raises
    ------
    ConfigError
        The file is damaged.
    """
    if path is None or not path.exists():
        return None
    try:
        saved: Any = parse_json(read_text(path))
    except ConfigError as problem:
        raise ConfigError(f"{path}: not a saved state of a tuner ({problem})") from problem
    if not isinstance(saved, dict):
        raise ConfigError(f"{path}: not a saved state of a tuner (no mapping)")
    return saved


def write_state(path: Path, saved: dict[str, Any]) -> None:
    """Puts a new state in place of the old one at once."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(saved))
    fresh.replace(path)
