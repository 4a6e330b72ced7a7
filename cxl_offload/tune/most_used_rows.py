"""Keeps the rows of a large embedding that are looked up often near, and the others far."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cxl_offload.memory import Session
from cxl_offload.memory.bounds import check_size
from cxl_offload.tune.most_used_parts import MostUsedParts, Slice


class MostUsedRows:
    """Counts the lookups of an embedding, and moves blocks of its rows between lookups.

    Rows move in blocks of whole pages, as many rows as fit; a last block that is smaller stays
    where it is.

    Parameters
    ----------
    embedding
        A ``torch.nn.Embedding``, or another module that is called with row numbers and has them in
        the first dimension of ``weight``; its weight is in memory of the session.
    near, far
        Nodes of the two tiers.
    room_bytes
        Room of the near tier for these rows.
    session
        The session that the weight is in.
    block_bytes
        Least bytes of a block.
    budget_bytes_per_step
        Bytes that may move after a forward pass, in the mean; 0 only advises.

    Attributes
    ----------
    parts
        Where every block is, and what has moved.
    rows
        Of a block.

    Raises
    ------
    ValueError
        The weight is not in memory of the session, has no whole block, or is not contiguous.
    """

    def __init__(
        self,
        embedding: torch.nn.Module,
        *,
        near: Sequence[int],
        far: Sequence[int],
        room_bytes: int,
        session: Session,
        block_bytes: int = 64 << 10,
        budget_bytes_per_step: int = 0,
    ) -> None:
        weight = embedding.weight
        if not isinstance(weight, torch.Tensor) or not weight.is_contiguous():
            raise ValueError("rows of an embedding need a contiguous weight")
        if weight.dim() < 1 or not weight.numel():
            raise ValueError(f"rows of a weight of shape {tuple(weight.shape)}: it has no row")
        check_size(block_bytes, "block_bytes")
        owner = session.find(weight.data_ptr())
        if owner is None:
            raise ValueError(
                "rows of an embedding: the weight is not in memory of this session; make it with "
                "cxl_offload.from_tensor"
            )
        row_bytes = weight[0].numel() * weight.element_size()
        whole = math.lcm(row_bytes, owner.unit_bytes)
        block = -(-block_bytes // whole) * whole
        self.rows = block // row_bytes
        self._blocks = weight.shape[0] // self.rows
        self._embedding = embedding
        self.parts = MostUsedParts(
            {
                f"rows {at * self.rows}..": [Slice(weight.data_ptr() + at * block, block)]
                for at in range(self._blocks)
            },
            near=near,
            far=far,
            room_bytes=room_bytes,
            session=session,
            budget_bytes_per_round=budget_bytes_per_step,
        )

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Counts and moves inside of the block."""
        hook = self._embedding.register_forward_hook(self._after_forward, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def _after_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        rows = args[0] if args else kwargs.get("input")
        if rows is None:
            return  # a module of others calls them by another name
        blocks = rows.flatten().cpu() // self.rows
        uses = torch.bincount(blocks[blocks < self._blocks], minlength=self._blocks)
        # A lookup reads one row of its block, so a move must repay itself by single rows.
        self.parts.round(uses.double().numpy() / self.rows)
