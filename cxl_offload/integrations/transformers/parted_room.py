"""K and V of one layer in two places: the first positions on an accelerator, the rest in a tier.

The cut is along positions, because new ones come at the end: what the accelerator has been given
stays as it is, candidates are taken back from the tier, and a prompt's beginning, which every step
reads, is where reading is fastest. The accelerator has its share of the room, and that is filled
first. When the room grows, or a window has slid out of it, the first positions of the tier move up.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from cxl_offload.integrations.transformers.accelerator_kv import AcceleratorKv
from cxl_offload.integrations.transformers.current_rows import RowPart
from cxl_offload.integrations.transformers.first_rooms import FirstRooms
from cxl_offload.integrations.transformers.parted_states import PartedStates
from cxl_offload.integrations.transformers.room import KeptAs, KvMemory, KvRoom, slack_of

KeysAndValues = tuple[torch.Tensor, torch.Tensor]
"""Keys and values."""


@dataclass(frozen=True, slots=True)
class _HeadSource:
    """Memory of the accelerator for what is kept as in the tier."""

    accelerator: AcceleratorKv
    dtype: KeptAs

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As of :class:`AcceleratorKv`."""
        return self.accelerator.empty(shape, dtype)


def room_of(
    memory: KvMemory,
    states: KeysAndValues,
    positions: int,
    batch: int | None = None,
    first: FirstRooms | None = None,
) -> KvRoom | PartedRoom:
    """The room of one layer, as :class:`KvRoom`; in two places where the accelerator has a share.

    Raises
    ------
    MemoryError
        A node or the accelerator has no room.
    """
    if memory.accelerator is None:
        return KvRoom(memory, *states, positions, batch, first)
    return PartedRoom(memory, memory.accelerator, states, positions, batch, first)


class PartedRoom:
    """What :class:`KvRoom` does, over a head on the accelerator and a tail in a tier.

    The tail has positions only when the head was full, and then nothing is appended to the head.

    Parameters
    ----------
    memory
        Of the tier.
    accelerator
        Of the head.
    states
        Keys and values: their shapes and types, and the device that the model computes on.
    positions
        Room at first, of both together.
    batch, first
        As of :class:`KvRoom`.
    """

    def __init__(
        self,
        memory: KvMemory,
        accelerator: AcceleratorKv,
        states: KeysAndValues,
        positions: int,
        batch: int | None = None,
        first: FirstRooms | None = None,
    ) -> None:
        self._accelerator = accelerator
        self._device = states[0].device
        on_head = accelerator.positions_of(positions)
        self._head = KvRoom(_HeadSource(accelerator, memory.dtype), *states, on_head, batch)
        self._tail = KvRoom(memory, *states, positions - on_head, batch, first)

    @property
    def tensors(self) -> KeysAndValues:
        """Memory of the tier, with the room for more."""
        return self._tail.tensors

    @property
    def positions(self) -> int:
        """How many are kept."""
        return self._head.positions + self._tail.positions

    @property
    def capacity(self) -> int:
        """How many have room."""
        return self._head.capacity + self._tail.capacity

    @property
    def part(self) -> RowPart | None:
        """Only these rows are seen and written while it is set."""
        return self._tail.part

    @part.setter
    def part(self, part: RowPart | None) -> None:
        self._head.part = self._tail.part = part

    def view(self, last: int | None = None) -> KeysAndValues:
        """Keys and values of the last positions, or of all; no copy."""
        seen = self.positions if last is None else min(last, self.positions)
        in_tail = min(seen, self._tail.positions)
        tails = self._tail.view(in_tail)
        if seen == in_tail:
            return tails
        heads = self._head.view(seen - in_tail)
        keys, values = (
            PartedStates(head, tail, self._device) for head, tail in zip(heads, tails, strict=True)
        )
        return keys, values

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write positions behind the others."""
        self.make_ready(keys.shape[2])
        self._device = keys.device
        on_head = min(keys.shape[2], self._head_free)
        if on_head:
            self._head.append(keys[:, :, :on_head], values[:, :, :on_head])
        if on_head < keys.shape[2]:
            self._tail.append(keys[:, :, on_head:], values[:, :, on_head:])

    @property
    def _head_free(self) -> int:
        """Positions that the next ones may take on the accelerator."""
        return 0 if self._tail.positions else self._head.free

    def make_ready(self, count: int) -> None:
        """Have room for so many more positions behind the others."""
        if count <= self._head_free + self._tail.free:
            return
        needed = self.positions + count
        gone = self._head.begin + self._tail.begin
        if needed <= self.capacity and gone >= slack_of(self.positions):
            self._fill_head()
            self._tail.to_front()
        else:
            self._resize(needed + slack_of(needed))

    def reserve(self, positions: int) -> None:
        """Have room for so many positions, those that were forgotten not counted."""
        if self._head.begin + self._tail.begin + positions > self.capacity:
            self._resize(max(positions, self.positions))

    def _resize(self, capacity: int) -> None:
        """The accelerator has its share of so many, and what it had."""
        on_head = max(self._accelerator.positions_of(capacity), self._head.positions)
        if on_head > self._head.capacity:
            self._head.resize(on_head)
        self._fill_head()
        self._tail.resize(max(capacity - self._head.capacity, self._tail.positions))

    def _fill_head(self) -> None:
        """Move the first positions of the tier to the end of what the accelerator has."""
        self._head.to_front()
        count = min(self._head.free, self._tail.positions)
        if count:
            keys, values = self._tail.view()
            self._head.take(keys[:, :, :count], values[:, :, :count])
            self._tail.keep_last(self._tail.positions - count)

    def select(self, rows: torch.Tensor) -> None:
        """Keep these sequences in this order, some perhaps twice; memory for as many is taken."""
        self._head.select(rows)
        self._tail.select(rows)

    def keep_last(self, positions: int) -> None:
        """Forget all before the last so many."""
        in_tail = min(positions, self._tail.positions)
        self._head.keep_last(positions - in_tail)
        self._tail.keep_last(in_tail)

    def drop_last(self, positions: int) -> None:
        """Forget the last so many, of those that are kept."""
        in_tail = min(positions, self._tail.positions)
        self._tail.drop_last(in_tail)
        self._head.drop_last(positions - in_tail)

    def stand(self) -> tuple[int, ...]:
        """What :meth:`append` changes, besides bytes."""
        return *self._head.stand(), *self._tail.stand()

    def go_back(self, stand: tuple[int, ...]) -> None:
        """Be as then, when no memory has been taken since."""
        self._head.go_back(stand[:2])
        self._tail.go_back(stand[2:])

    def copy(self) -> PartedRoom:
        """The same positions in memory of their own."""
        made = copy.copy(self)
        made._head, made._tail = self._head.copy(), self._tail.copy()
        return made
