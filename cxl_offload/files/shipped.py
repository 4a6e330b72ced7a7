"""The files of ``configs/`` that come with the package."""

from __future__ import annotations

import contextlib
from importlib import resources
from pathlib import Path
from typing import Literal

Shelf = Literal["machines", "models"]


def shipped_names(shelf: Shelf) -> tuple[str, ...]:
    """Names of the YAML files of one folder of ``configs/``, sorted, without the suffix."""
    return tuple(sorted(path.stem for path in _folder(shelf).glob("*.yaml")))


def shipped_file(shelf: Shelf, name: str) -> Path:
    """The file of one of :func:`shipped_names`."""
    return _folder(shelf) / f"{name}.yaml"


def _folder(shelf: Shelf) -> Path:
    """In the installed package, or in the source tree next to it."""
    with contextlib.suppress(ModuleNotFoundError):
        folder = Path(str(resources.files("cxl_offload.configs"))) / shelf
        if folder.is_dir():
            return folder
    return Path(__file__).parents[2] / "configs" / shelf
