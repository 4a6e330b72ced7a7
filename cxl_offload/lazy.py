"""Names that a package hands out before it has loaded the modules they are in."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from cxl_offload.renamed import old_names

_CORE = "_C"

_OF_USERS = frozenset({"torch", "deepspeed", "flexgen", "transformers", "vllm"})
"""Packages that users install themselves, in the version that they need."""


def _core(package: str) -> Any:
    """The C++ core; says what to do where this is a source tree in which nothing was built."""
    try:
        return importlib.import_module(f"{package}.{_CORE}")
    except ModuleNotFoundError as error:
        if error.name != f"{package}.{_CORE}":
            raise
        folder = Path(sys.modules[package].__path__[0])
        raise ImportError(
            f"{folder} has no C++ core: it is a source tree in which nothing was built, and Python "
            "looks there first. Leave it to use an installed cxl_offload, or build in it with "
            "`make` or `pip install -e .`"
        ) from None


class _NoCore(MetaPathFinder):
    """Says why there is no C++ core here, before anything loads it."""

    def __init__(self, core: str) -> None:
        self._core = core

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname == self._core:
            raise ImportError(
                f"{fullname} loads in the main interpreter only, as torch does; use threads or "
                "processes instead of subinterpreters"
            )


def refuse_core_in_subinterpreters(package: str) -> None:
    """Lets the import of the C++ core fail where it would wait forever.

    Its bindings ask for the interpreter's lock by ``PyGILState_Ensure``, which knows the main
    interpreter only and waits for a lock that the subinterpreter holds.
    """
    name = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    try:
        interpreters = importlib.import_module(name)
    except ImportError:  # a Python that was built without them
        return
    if interpreters.get_current() != interpreters.get_main():
        sys.meta_path.insert(0, _NoCore(f"{package}.{_CORE}"))


def _lazy_imports(package: str) -> dict[str, str]:
    """What a package imports for type checkers alone: each name, and the module it is from."""
    spec = sys.modules[package].__spec__
    loader = None if spec is None else spec.loader
    source = loader.get_source(package) if isinstance(loader, InspectLoader) else None
    if source is None:
        raise ImportError(
            f"{package} has no source to read its names off; install its .py files too, not only "
            "compiled ones"
        )
    return {
        alias.name: found.module
        for block in ast.parse(source).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for found in block.body
        if isinstance(found, ast.ImportFrom) and found.module is not None
        for alias in found.names
    }


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and the ``__dir__`` of a package whose names load on their first use.

    The names are those that the package imports under ``if TYPE_CHECKING:``, each as itself
    (``from home import name as name``), which is how type checkers know what is handed on. They
    stand there and nowhere else: ``__all__`` is read off them.

    Parameters
    ----------
    package
        Its ``__name__``. A name imported from the package itself is a module inside of it.

    Raises
    ------
    ImportError
        The package was installed without its source.

    Notes
    -----
    Old names of the package come from :data:`cxl_offload.renamed.RENAMED`.
    """
    home_of = _lazy_imports(package)
    find_old = old_names(package, depth=3)

    def find(name: str) -> Any:
        if name == _CORE:
            return _core(package)
        if name == "__all__":
            return sorted(home_of)
        if name not in home_of:
            return find_old(name)
        home = home_of[name]
        try:
            value = (
                importlib.import_module(f"{package}.{name}")
                if home == package
                else getattr(importlib.import_module(home), name)
            )
        except ModuleNotFoundError as error:
            if error.name not in _OF_USERS:
                raise
            raise ModuleNotFoundError(
                f"{package}.{name} needs {error.name}; install it, e.g. pip install {error.name}",
                name=error.name,
            ) from error
        vars(sys.modules[package])[name] = value
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return find, names
