"""Growing layers of a cache with keys and values in tiers: all positions, or a sliding window.

Each takes the place of a layer of transformers and is asked for the same; what differs is that new
positions are written behind the others, where transformers makes a longer tensor of all.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.compiler import is_compiling
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from cxl_offload.integrations.transformers.first_rooms import FirstRooms
from cxl_offload.integrations.transformers.parted_room import PartedRoom, room_of
from cxl_offload.integrations.transformers.room import (
    KvMemory,
    KvRoom,
    as_states,
    slack_of,
)
from cxl_offload.ops.view import untraced

_NO_GRADIENTS = (
    "KV in tiers is written in place and carries no gradients; compute under torch.no_grad(), or "
    "with use_cache=False"
)


class GrowingStates:
    """What both growing layers do with their room; the class beside it is transformers'.

    Parameters
    ----------
    memory
        Where keys and values are.
    expected
        Positions to have room for at first; 0 where it is not known.
    """

    _sees_all = True
    """Whether a new position sees all that is kept."""

    keys: Any
    values: Any
    is_initialized: bool
    dtype: torch.dtype
    device: torch.device

    def _begin(self, memory: KvMemory, expected: int) -> None:
        self._memory = memory
        self._expected = expected
        self._room: KvRoom | PartedRoom | None = None
        self.first_rooms: FirstRooms | None = None
        """What layers of the cache share where they are small; None: each has its own."""

    def kept_tensors(self) -> tuple[torch.Tensor, ...]:
        """All memory of a tier that is held, keys first; none before the first states."""
        return () if self._room is None else self._room.tensors

    def _show(self, seen: tuple[Any, Any] | None = None) -> None:
        """transformers reads the attributes; ``seen``, if the caller has them already."""
        if seen is None:
            seen = (None, None) if self._room is None else self._room.view()
        self.keys, self.values = seen

    def _first_room(self, count: int) -> int:
        """Positions to have room for when the first ``count`` come."""
        return max(self._expected, count) if self._expected else count + slack_of(count)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The first states say types and shapes."""
        self.dtype, self.device = key_states.dtype, key_states.device
        positions, part = self._first_room(key_states.shape[2]), self._memory.current.part
        batch = None if part is None else part.total
        first, self.first_rooms = self.first_rooms, None
        self._room = room_of(self._memory, (key_states, value_states), positions, batch, first)
        self.is_initialized = True
        self._show()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new positions; those that the new ones may see are returned.

        Of a batch that is computed in parts these are some rows, and the cache goes on only when
        the last of them are there.
        """
        if is_compiling():  # memory is written through addresses that mean nothing while it traces
            return _update_as_it_is(self, key_states, value_states)
        refuse_gradients(key_states)
        if self._room is None:
            self.lazy_initialization(key_states, value_states)
        room, part = self._room, self._memory.current.part
        assert room is not None
        if part is None:
            seen = self._write(room, key_states, value_states)
            if self._sees_all and seen[0] is not key_states:
                self._show(seen)
                return seen
        else:
            if part.is_first:  # other rows must not move between the parts
                room.make_ready(int(key_states.shape[2]))
            before = self._stand()
            room.part = part
            try:
                seen = self._write(room, key_states, value_states)
            finally:
                room.part = None
                if not part.is_last:
                    self._go_back(before)
        self._show()
        return seen

    def _write(
        self, room: KvRoom | PartedRoom, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def _stand(self) -> tuple[int, ...]:
        """What :meth:`_write` changes, besides bytes."""
        assert self._room is not None
        return self._room.stand()

    def _go_back(self, stand: tuple[int, ...]) -> None:
        assert self._room is not None
        self._room.go_back(stand)

    def _select(self, rows: torch.Tensor) -> None:
        if self._room is not None:
            self._room.select(rows.to("cpu"))
            self._show()

    def _crop(self, tokens_to_remove: int) -> None:
        if self._room is None:
            return
        kept = self._room.positions
        removed = kept - tokens_to_remove if tokens_to_remove > 0 else -tokens_to_remove
        self._room.drop_last(min(max(0, removed), kept))
        self._show()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Beam search goes on with these sequences."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence so many times."""
        if self._room is not None:
            self._select(torch.arange(self.keys.shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only these sequences."""
        if self._room is not None:
            self._select(torch.arange(self.keys.shape[0])[indices.to("cpu")])

    def reset(self) -> None:
        """As new; the memory is given back."""
        self._room = None
        self.is_initialized = False
        self._show()
        if hasattr(self, "cumulative_length"):
            self.cumulative_length = 0

    def offload(self) -> None:
        """It lies in its tier already."""

    def prefetch(self) -> None:
        """It is read where it lies."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy in the same tiers; torch would copy into ordinary memory."""
        made = copy.copy(self)
        memo[id(self)] = made
        made._room = None if self._room is None else self._room.copy()
        made._show()
        return made


@untraced
def _update_as_it_is(
    layer: GrowingStates, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.update(keys, values)


class TierLayer(GrowingStates, DynamicLayer):  # type: ignore[misc]
    """All positions."""

    def __init__(self, memory: KvMemory, expected: int = 0) -> None:
        DynamicLayer.__init__(self)
        self._begin(memory, expected)

    def _write(
        self, room: KvRoom | PartedRoom, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All positions are returned, where they lie."""
        first = room.positions == 0
        room.append(keys, values)
        # A prompt attends to what has just been computed: that is still near.
        return (keys, values) if first else room.view()

    def reserve(self, positions: int) -> None:
        """Have room for so many positions when they come."""
        self._expected = positions
        if self._room is not None:
            self._room.reserve(positions)
            self._show()

    def get_seq_length(self) -> int:
        """Positions so far."""
        return 0 if self._room is None else self._room.positions

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last positions; a positive number is how many stay, as transformers has it."""
        self._crop(tokens_to_remove)


class TierSlidingLayer(GrowingStates, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """The last positions that a window reaches; all of them while candidates may be taken back."""

    _sees_all = False

    def __init__(self, sliding_window: int, memory: KvMemory, expected: int = 0) -> None:
        DynamicSlidingWindowLayer.__init__(self, sliding_window)
        self._begin(memory, expected)

    @property
    def _reach(self) -> int:
        """Earlier positions that the next one sees."""
        return int(self.sliding_window) - 1

    def _first_room(self, count: int) -> int:
        return min(super()._first_room(count), self._reach + slack_of(self._reach))

    def reserve(self, positions: int) -> None:
        """Say how many positions will come, where none came yet; later the room is the window's."""
        if self._room is None:
            self._expected = positions

    def _stand(self) -> tuple[int, ...]:
        return *super()._stand(), self.cumulative_length

    def _go_back(self, stand: tuple[int, ...]) -> None:
        super()._go_back(stand[:-1])
        self.cumulative_length = stand[-1]

    def _write(
        self, room: KvRoom | PartedRoom, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """They and those that their window reaches are returned."""
        count = int(keys.shape[2])
        before = min(room.positions, self._reach)
        self.cumulative_length += count
        if before and (self.record_past or count <= slack_of(self._reach)):
            room.append(keys, values)
            seen = room.view(before + count)
            self._keep_reach()
        else:
            past = room.view(before)
            seen = _joined(past, (keys, values)) if before else (keys, values)
            self._append_last(keys, values)
        return seen

    def _append_last(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write no more than will be kept: a prompt may be longer than the window."""
        assert self._room is not None
        count = int(keys.shape[2])
        if not self.record_past:
            kept = min(count, self._reach)
            self._keep_last(self._reach - kept)
            keys, values = keys[:, :, count - kept :], values[:, :, count - kept :]
        self._room.append(keys, values)

    def _keep_reach(self) -> None:
        if not self.record_past:
            self._keep_last(self._reach)

    def _keep_last(self, positions: int) -> None:
        assert self._room is not None
        self._room.keep_last(positions)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last positions, and those that no window reaches any more.

        Raises
        ------
        RuntimeError
            Earlier positions are gone already; transformers asks for them to be kept with
            ``activate_past_recording``.
        """
        if self.cumulative_length < self.sliding_window:
            self._crop(tokens_to_remove)
            self.cumulative_length = 0 if self._room is None else self._room.positions
            return
        if not self.record_past or tokens_to_remove > 0:
            raise RuntimeError(
                f"crop({tokens_to_remove}) of a window of {self.sliding_window} that is full: call "
                "activate_past_recording() before, and give a negative number"
            )
        self._crop(tokens_to_remove)
        self.cumulative_length += tokens_to_remove
        self._keep_last(self._reach)
        self._show()


def _joined(
    past: tuple[torch.Tensor, torch.Tensor], new: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = (
        torch.cat([as_states(old, states), states], dim=2)
        for old, states in zip(past, new, strict=True)
    )
    return keys, values


def refuse_gradients(states: torch.Tensor) -> None:
    if states.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(_NO_GRADIENTS)
