"""An extra names what its integration imports, and no more."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "cxl_offload"
ROOM_OF = {
    "torch": PACKAGE,
    "plot": PACKAGE,
    "metrics": PACKAGE,
    **{path.name: path for path in (PACKAGE / "integrations").iterdir() if path.is_dir()},
}
IMPORTED_AS = {"opentelemetry_api": "opentelemetry", "pyyaml": "yaml"}
"""Where a distribution's module has another name."""


def modules(requirements: list[str]) -> set[str]:
    names = (re.match(r"[\w.-]+", each) for each in requirements)
    plain = {name.group().lower().replace("-", "_") for name in names if name}
    return {IMPORTED_AS.get(name, name) for name in plain}


@pytest.fixture(scope="module")
def core() -> set[str]:
    return modules(project()["dependencies"])


@pytest.fixture(scope="module")
def extras() -> dict[str, set[str]]:
    return {name: modules(named) for name, named in project()["optional-dependencies"].items()}


def project() -> dict[str, object]:
    tomllib = pytest.importorskip("tomllib")
    read: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return read


def for_types_alone(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports_of(node: ast.AST) -> Iterator[str]:
    """Top-level names of the modules that running it may import."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name.split(".")[0] for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.level == 0 and child.module:
            yield child.module.split(".")[0]
        elif not for_types_alone(child):
            yield from imports_of(child)


@cache
def imported_by(file: Path) -> set[str]:
    return set(imports_of(ast.parse(file.read_text())))


def imported(room: Path) -> set[str]:
    """Modules of others, by any file below a folder."""
    found = set().union(*map(imported_by, sorted(room.rglob("*.py"))))
    return found - set(sys.stdlib_module_names) - {"cxl_offload"}


def test_extra_asks_only_for_what_is_imported(extras: dict[str, set[str]]) -> None:
    for name, asked in extras.items():
        if name != "all":
            assert asked <= imported(ROOM_OF[name]), name


def test_package_imports_only_what_it_or_an_extra_asks_for(
    core: set[str], extras: dict[str, set[str]]
) -> None:
    assert imported(PACKAGE) <= core.union(*extras.values())
    for name in extras.keys() & {path.name for path in (PACKAGE / "integrations").iterdir()}:
        assert imported(ROOM_OF[name]) <= core | extras[name], name


def test_every_dependency_of_the_core_is_imported(core: set[str]) -> None:
    assert core <= imported(PACKAGE)


def test_all_is_every_extra_that_can_be_in_one_environment(extras: dict[str, set[str]]) -> None:
    named = project()["optional-dependencies"]
    assert isinstance(named, dict)
    (together,) = named["all"]
    within = set(together.removeprefix("cxl_offload[").removesuffix("]").split(","))
    assert within == extras.keys() - {"all", "vllm"}
