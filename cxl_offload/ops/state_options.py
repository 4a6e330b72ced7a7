"""Options of an optimizer that hold for all of its parameters, so that no group has one."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, TypedDict

import torch

from cxl_offload.memory import Pages, PolicyLike, Session
from cxl_offload.ops.threads import Threads


class StateOptions(TypedDict, total=False):
    """Keywords of every optimizer, explained at
    :class:`cxl_offload.ops.optimizer.OnePassOptimizer`."""

    state_dtype: torch.dtype
    rounding_seed: int | None
    policy: PolicyLike | None
    pages: Pages
    session: Session | None
    threads: Threads
    overlap: bool
    late_max_norm: float | None


_OLD_NAMES = {"placement": "policy"}

OPTIONS = frozenset({*StateOptions.__annotations__, *_OLD_NAMES})
"""Which keywords these are, also by their old names."""


class _SameSession:
    """A session on its way into a copy, which shares it, or a pickle, which cannot have it."""

    def __init__(self, session: Session | None) -> None:
        self.session = session

    def __deepcopy__(self, memo: dict[int, Any]) -> _SameSession:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _SameSession, (None,)


def kept_options(optimizer: object) -> dict[str, Any]:
    """The options of an optimizer, for its copies and pickles; :func:`taken_options` reads them."""
    options = {name: getattr(optimizer, name) for name in StateOptions.__annotations__}
    return {**options, "session": _SameSession(options["session"])}


def taken_options(state: dict[str, Any]) -> dict[str, Any]:
    """What a copy or a pickle brought, with the session that it is to have."""
    kept = state.get("session")
    return {**state, "session": kept.session} if isinstance(kept, _SameSession) else state


_HOW_TORCH_COMPUTES = {"foreach", "fused", "capturable"}
"""Keywords of torch's optimizers that change nothing here."""


def check_keywords(name: str, keywords: Set[str]) -> None:
    """Refuse keywords of the constructor that neither this package nor torch has (TypeError)."""
    if unknown := keywords - _HOW_TORCH_COMPUTES:
        raise TypeError(f"{name} has no keyword {', '.join(sorted(unknown))}")


def check_no_options(name: str, settings: Mapping[str, str], group: Mapping[str, Any]) -> None:
    """Refuse a group with an option that nothing would read there.

    Parameters
    ----------
    name
        Of the optimizer's class.
    settings
        Options of its constructor, to what a group calls them.
    group
        As given. Names that no optimizer knows are the caller's own and stay.

    Raises
    ------
    ValueError
        One line that says where the option belongs.
    """
    for option, setting in settings.items():
        if option in group:
            raise ValueError(f"{name}: {option} in a group does nothing; there it is {setting}")
    for option in sorted(OPTIONS):
        if option in group:
            keyword = _OLD_NAMES.get(option, option)
            raise ValueError(
                f"{name}: {option} in a group does nothing; it holds for all groups: take it out, "
                f"and give {name}(..., {keyword}=...)"
            )
