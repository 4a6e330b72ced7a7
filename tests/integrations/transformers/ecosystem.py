"""Packages beside transformers that only ``make test-ecosystem`` installs."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import pytest

_SETTING = "CXL_OFFLOAD_REQUIRE_ECOSYSTEM"


def needed(name: str) -> Any:
    """The module; the test is skipped, or fails where it is required, without the package."""
    if _is_there(name):
        return importlib.import_module(name)
    if os.environ.get(_SETTING, "") == "1":
        pytest.fail(f"{_SETTING}=1, but {name} is not installed")
    pytest.skip(f"{name} is not installed; make test-ecosystem installs it")


def _is_there(name: str) -> bool:
    package, _, inner = name.partition(".")
    return importlib.util.find_spec(package) is not None and (
        not inner or importlib.util.find_spec(name) is not None
    )
