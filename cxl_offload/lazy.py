"""Names that a package hands out before it has loaded the modules they are in."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from cxl_offload.renamed import old_names

_CORE = "_C"


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


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]], *, modules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and the ``__dir__`` of a package whose names load on their first use.

    Parameters
    ----------
    package
        Its ``__name__``.
    homes
        Module inside of the package to the names it gives.
    modules
        Modules inside of it that are names of the package too, without an import of their own.

    Notes
    -----
    Old names of the package come from :data:`cxl_offload.renamed.RENAMED`.
    """
    home_of = {name: home for home, names in homes.items() for name in names}
    find_old = old_names(package, depth=3)

    def find(name: str) -> Any:
        if name == _CORE:
            return _core(package)
        if name not in home_of and name not in modules:
            return find_old(name)
        try:
            value = (
                importlib.import_module(f"{package}.{name}")
                if name in modules
                else getattr(importlib.import_module(f"{package}.{home_of[name]}"), name)
            )
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(
                f"{package}.{name} needs torch; install it, e.g. pip install torch"
            ) from error
        vars(sys.modules[package])[name] = value
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of, *modules})

    return find, names
