"""Keys or values in two places: the first positions on an accelerator, the rest in a tier.

The attention of a block reads both parts where they are. Whatever else a model does with such
states is done with all positions joined on the device that it computes on, so no operator has to
know.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map


class PartedStates(torch.Tensor):
    """``(batch, heads, positions, dim)`` of two tensors, for operators of torch one on ``device``.

    Parameters
    ----------
    head
        The first positions, on an accelerator.
    tail
        The others, in host memory; of the same type.
    device
        Where the model computes.
    """

    head: torch.Tensor
    tail: torch.Tensor

    @staticmethod
    def __new__(cls, head: torch.Tensor, tail: torch.Tensor, device: torch.device) -> PartedStates:
        batch, heads, positions, dim = head.shape
        shape = (batch, heads, positions + tail.shape[2], dim)
        made: PartedStates = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=head.dtype, device=device
        )
        return made

    def __init__(self, head: torch.Tensor, tail: torch.Tensor, device: torch.device) -> None:
        self.head = head
        self.tail = tail

    def joined(self) -> torch.Tensor:
        """One tensor of all positions on ``device``; no copy of one part that is alone there."""
        parts = [part.to(self.device) for part in (self.head, self.tail) if part.shape[2]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return (
            f"PartedStates({tuple(self.shape)}, {self.dtype}, {self.head.shape[2]} positions on "
            f"{self.head.device})"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Every operator reads the joined positions.

        Raises
        ------
        TypeError
            It writes: what it wrote to would be a copy.
        """
        if func._schema.is_mutable and isinstance(args[0], PartedStates):
            raise TypeError(
                f"{func}: states that lie on an accelerator and in a tier are read only; write to "
                "their head and their tail"
            )
        given, named = tree_map(_joined, (args, kwargs or {}))
        return func(*given, **named)


def _joined(given: Any) -> Any:
    return given.joined() if isinstance(given, PartedStates) else given
