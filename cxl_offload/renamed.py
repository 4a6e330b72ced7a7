"""Old names, which work for one more version: each use warns and names the new one.

:mod:`cxl_offload.former_names` is the one list of what moved. A module whose names moved ends with
``__getattr__ = old_names(__name__)``; a module that is gone needs nothing, since the package's
importer makes it up from the list. A keyword that got another name stays with
:func:`renamed_keywords`, an attribute of a class with :func:`renamed_attribute`.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from cxl_offload.former_names import GONE, RENAMED

P = ParamSpec("P")
R = TypeVar("R")


def _longest(old: str, table: Mapping[str, str]) -> tuple[str, str] | None:
    """The entry of a dotted name, or of what it is inside of, and the rest of the name."""
    head, rest = old, ""
    while head:
        if head in table:
            return table[head], rest
        head, _, last = head.rpartition(".")
        rest = f".{last}{rest}"
    return None


def new_name(old: str) -> str | None:
    """What a dotted name is called now; None for a name that was not renamed."""
    new, found = None, _longest(old, RENAMED)
    while found is not None:
        new = "".join(found)
        found = _longest(new, RENAMED)
    return new


def old_names(module: str, *, depth: int = 2) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module: finds what the list says was there, and warns.

    Parameters
    ----------
    module
        Its ``__name__``.
    depth
        Frames up to who asks for the name, as the ``stacklevel`` of a warning.
    """

    def find(name: str) -> Any:
        old = f"{module}.{name}"
        is_public = not name.startswith("__") or name == "__all__"
        gone = _longest(old, GONE) if is_public else None
        new = new_name(old) if is_public and (gone is None or old in RENAMED) else None
        if new is None:
            raise AttributeError(
                f"module {module!r} has no attribute {name!r}" + (f": {gone[0]}" if gone else "")
            )
        warnings.warn(
            f"{old} is now {new}; the old name goes with the next version",
            DeprecationWarning,
            stacklevel=depth,
        )
        return _load(new)

    return find


def _load(dotted: str) -> Any:
    """The module or the attribute of that name."""
    home, _, name = dotted.rpartition(".")
    try:
        return getattr(importlib.import_module(home), name)
    except AttributeError:
        return importlib.import_module(dotted)


def _is_module(old: str) -> bool:
    """Whether an old name is now called what is a module."""
    new = new_name(old)
    try:
        return new is not None and find_spec(new) is not None
    except ModuleNotFoundError:
        return False


class _GoneModules(MetaPathFinder, Loader):
    """Makes up the modules that exist only as old names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("cxl_offload."):
            return None
        holds_renamed = any(old.startswith(f"{fullname}.") for old in RENAMED)
        gone = _longest(fullname, GONE)
        if gone is not None and not holds_renamed:
            # With its name, ``from module import name`` would hide the sentence behind its own.
            raise ModuleNotFoundError(f"{fullname} is gone: {gone[0]}")
        if holds_renamed or _is_module(fullname):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "Gone; its names warn and come from where they are now."
        setattr(module, "__getattr__", old_names(module.__name__))  # noqa: B010


def remember_gone_modules() -> None:
    """Lets the import of a module that moved find the names that it had."""
    if not any(isinstance(finder, _GoneModules) for finder in sys.meta_path):
        sys.meta_path.append(_GoneModules())


def renamed_keywords(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Lets a function take keywords by their old names, with a warning that names the new.

    Parameters
    ----------
    **names
        Old keyword to the new one.
    """

    def decorate(call: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(call)
        def with_old(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in names.keys() & kwargs.keys():
                new = names[old]
                if new in kwargs:
                    raise TypeError(f"{call.__qualname__}: {old} is {new}, which is given too")
                warnings.warn(
                    f"{call.__qualname__}: {old}= is now {new}=; the old keyword goes with the "
                    "next version",
                    DeprecationWarning,
                    stacklevel=2,
                )
                kwargs[new] = kwargs.pop(old)
            return call(*args, **kwargs)

        return with_old

    return decorate


def renamed_attribute(old: str, new: str) -> property:
    """An attribute or method of a class by its old name, with a warning that names the new."""

    def get(instance: object) -> Any:
        warnings.warn(
            f"{type(instance).__name__}.{old} is now {new}; the old name goes with the next "
            "version",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(instance, new)

    return property(get, doc=f"Old name of ``{new}``.")
