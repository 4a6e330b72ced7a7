"""Hidden states that lie in a tier, for a model that computes on an accelerator.

Layers copy the rows that they compute. Between layers a model does little: it adds positions,
multiplies by a number, cuts off the last token. What is done element by element is done by the CPU
where the states lie, some rows at a time, so that the accelerator never has all rows; whatever else
a model does reads a copy of all rows there, so that no operator has to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map

from cxl_offload.transfer import CopyHandle


class TierRoom(Protocol):
    """What gives hidden states their memory."""

    device: torch.device
    rows_at_once: int

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised, contiguous, in the tier."""


class TierStates(torch.Tensor):
    """``(rows, ...)`` in a tier, for operators of torch a tensor on the accelerator.

    Parameters
    ----------
    host
        Contiguous, in the tier. What of it was not copied back yet has a handle in ``coming``.
    room
        Gives results their memory, and says where the model computes.
    coming
        Copies under way to rows of ``host``, by the first of these rows; None: there are none.
    """

    host: torch.Tensor
    coming: dict[int, CopyHandle]
    _room: TierRoom

    @staticmethod
    def __new__(
        cls,
        host: torch.Tensor,
        room: TierRoom,
        coming: dict[int, CopyHandle] | None = None,
    ) -> TierStates:
        made: TierStates = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, dtype=host.dtype, device=room.device
        )
        return made

    def __init__(
        self,
        host: torch.Tensor,
        room: TierRoom,
        coming: dict[int, CopyHandle] | None = None,
    ) -> None:
        self.host = host
        self.coming = {} if coming is None else coming
        self._room = room

    def arrived(self) -> torch.Tensor:
        """``host``, once all rows have been copied back.

        Raises
        ------
        OSError
            The driver refused one of the copies.
        """
        for handle in self.coming.values():
            handle.wait()
        self.coming.clear()
        return self.host

    def on_device(self) -> torch.Tensor:
        """A copy of all rows where the model computes."""
        return self.arrived().to(self._room.device)

    def tolist(self) -> list[Any]:
        """As of a copy."""
        found: list[Any] = self.on_device().tolist()
        return found

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        """A tensor where the model computes, which the block's tier does not hold."""
        return self.on_device().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What is saved is such a tensor, too."""
        return self.on_device().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TierStates({tuple(self.shape)}, {self.dtype}, for {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What is done by element is done in the tier, all else with all rows on the accelerator.

        Raises
        ------
        TypeError
            It writes: what it wrote to would be a copy.
        """
        named = kwargs or {}
        writes = func._schema.is_mutable
        if writes and _written_to(func, args, named):
            raise TypeError(f"{func}: hidden states in a tier are read only; write to their copy")
        states = next(each for each in tree_leaves((args, named)) if isinstance(each, TierStates))
        if func.is_view:
            return states._viewed(func, args, named)
        if not writes and torch.Tag.pointwise in func.tags and _fits(states, (args, named)):
            return states._by_element(func, args, named)
        given, others = tree_map(on_device, (args, named))
        return func(*given, **others)

    def _viewed(self, func: Any, args: Any, named: Any) -> Any:
        """Of all rows: in the tier, contiguous; of some of them: on the accelerator."""
        view = func(self.host, *args[1:], **named)
        if not isinstance(view, torch.Tensor):
            return func(self.on_device(), *args[1:], **named)
        if view.shape == self.shape and view.is_contiguous():
            return TierStates(view, self._room, self.coming)
        self.arrived()
        if view.dim() < 2 or view.shape[0] != self.shape[0]:
            return view.to(self._room.device)
        made = self._room.host_memory(view.shape, view.dtype)
        made.copy_(view)
        return TierStates(made, self._room)

    def _by_element(self, func: Any, args: Any, named: Any) -> TierStates:
        """Some rows at a time, so that ordinary memory has no copy of all of them."""
        args, named = tree_map(_on_host, (args, named))
        made: torch.Tensor | None = None
        for begin in range(0, self.shape[0], self._room.rows_at_once):
            rows = slice(begin, begin + self._room.rows_at_once)

            def part(given: Any, rows: slice = rows) -> Any:
                whole = isinstance(given, torch.Tensor) and given.dim() == self.dim()
                return given[rows] if whole and given.shape[0] == self.shape[0] else given

            given, others = tree_map(part, (args, named))
            done = func(*given, **others)
            if made is None:
                made = self._room.host_memory(self.shape, done.dtype)
            made[rows] = done
        assert made is not None
        return TierStates(made, self._room)


def on_device(given: Any) -> Any:
    """Hidden states in a tier as a copy where the model computes; all else as it is."""
    return given.on_device() if isinstance(given, TierStates) else given


def _written_to(func: Any, args: Any, named: Any) -> bool:
    """Whether an operator writes to hidden states in a tier, wherever they are among what it is
    given."""
    for at, each in enumerate(func._schema.arguments):
        given = args[at] if at < len(args) else named.get(each.name)
        written = each.alias_info is not None and each.alias_info.is_write
        if written and any(isinstance(leaf, TierStates) for leaf in tree_leaves(given)):
            return True
    return False


def _on_host(given: Any) -> Any:
    if isinstance(given, TierStates):
        return given.arrived()
    return given.to("cpu") if isinstance(given, torch.Tensor) else given


def _fits(states: TierStates, given: Any) -> bool:
    """Whether what is given makes a result of the shape of the states, which are not empty."""
    shapes = [each.shape for each in tree_leaves(given) if isinstance(each, torch.Tensor)]
    joined = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return bool(states.numel()) and bool(joined == states.shape)
