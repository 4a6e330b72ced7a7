"""Packages whose names load on their first use: what is read off the imports for type checkers."""

from __future__ import annotations

import compileall
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = """
from typing import TYPE_CHECKING
from cxl_offload.lazy import lazy_names

if TYPE_CHECKING:
    from orchard import seeds as seeds
    from orchard.trees import Apple as Apple
    from orchard.trees import grow as grow

__getattr__, __dir__ = lazy_names(__name__)
"""
TREES = "class Apple: ...\ndef grow(): return Apple()\n_unlisted = 1\n"


@pytest.fixture
def orchard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "orchard"
    folder.mkdir()
    for name, text in {"__init__": SOURCE, "trees": TREES, "seeds": "count = 3\n"}.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [each for each in sys.modules if each.partition(".")[0] == "orchard"]:
        del sys.modules[name]


def test_names_of_a_lazy_package_load_their_module_when_first_used(orchard: Path) -> None:
    package = importlib.import_module("orchard")
    assert {"Apple", "grow", "seeds"} <= set(dir(package))
    assert not {"orchard.trees", "orchard.seeds"} & set(sys.modules)
    assert isinstance(package.grow(), package.Apple)
    assert "orchard.seeds" not in sys.modules
    assert isinstance(package.seeds, ModuleType)
    assert package.seeds.count == 3
    assert "Apple" in vars(package), "the second use asks nobody"


def test_names_of_a_lazy_package_come_by_a_star(orchard: Path) -> None:
    got: dict[str, object] = {}
    exec("from orchard import *", got)
    assert set(got) - {"__builtins__"} == {"Apple", "grow", "seeds"}
    assert importlib.import_module("orchard").__all__ == ["Apple", "grow", "seeds"]


def test_name_that_a_lazy_package_does_not_list_is_not_there(orchard: Path) -> None:
    package = importlib.import_module("orchard")
    with pytest.raises(AttributeError, match="module 'orchard' has no attribute '_unlisted'"):
        _ = package._unlisted


def test_lazy_package_without_source_is_refused_with_a_remedy(orchard: Path) -> None:
    compileall.compile_dir(orchard, legacy=True, quiet=2)
    for path in orchard.glob("*.py"):
        path.unlink()
    with pytest.raises(ImportError, match=r"orchard has no source .* install its \.py files too"):
        importlib.import_module("orchard")


@pytest.mark.parametrize("framework", ["torch", "deepspeed"])
def test_framework_that_is_not_installed_is_named_with_a_remedy(
    orchard: Path, framework: str
) -> None:
    missing = f"raise ModuleNotFoundError('none', name='{framework}')\n"
    (orchard / "trees.py").write_text(missing + TREES)
    package = importlib.import_module("orchard")
    needs = f"^orchard.grow needs {framework}; install it, e.g. pip"
    with pytest.raises(ModuleNotFoundError, match=needs) as refused:
        _ = package.grow
    assert refused.value.name == framework
