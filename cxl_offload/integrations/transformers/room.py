"""K and V of one layer in memory of a policy: written once, read where they lie."""

from __future__ import annotations

import copy
import math
import mmap
from dataclasses import dataclass, field, replace
from typing import Literal, NoReturn, Protocol

import torch

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.accelerator_kv import AcceleratorKv
from cxl_offload.integrations.transformers.beam_rows import gather_rows
from cxl_offload.integrations.transformers.current_rows import CurrentRows, RowPart
from cxl_offload.integrations.transformers.first_rooms import FirstRooms, Wanted
from cxl_offload.integrations.transformers.int4_rows import decoded, encoded
from cxl_offload.integrations.transformers.parted_states import PartedStates
from cxl_offload.memory import Interleave, Weighted
from cxl_offload.objects.kind_store import TierStore
from cxl_offload.plan.kv_types import CODES, KV_TYPES, int4_row_bytes
from cxl_offload.tensor import copy_whole

SMALL_TYPES: tuple[torch.dtype, ...] = tuple(
    getattr(torch, name) for name in KV_TYPES if name != CODES
)
"""What keys and values can be kept as, besides their own type and codes."""

KeptAs = torch.dtype | Literal["int4"] | None
"""One of these; None: the type of the states."""

_LEAST_SLACK = 64
_SLACK_SHARE = 8
"""Room grows by an eighth: a position is then moved about eight times before as many are new."""


@dataclass(frozen=True, slots=True)
class KvMemory:
    """Where a cache gets its memory.

    Parameters
    ----------
    store
        Has the policy of ``kv``, and counts.
    dtype
        Of what is kept: an 8-bit float type, or ``"int4"``; None: that of the states.
    current
        Set by a layer that computes its rows in parts.
    whole_sequences
        Whether a policy that stripes puts each sequence on one node.
    accelerator
        Has the first positions of every layer that grows; None: the tier has all.

    Raises
    ------
    ConfigError
        A type that nothing is kept as, or whole sequences without a policy of ``kv``.
    """

    store: TierStore
    dtype: KeptAs = None
    current: CurrentRows = field(default_factory=CurrentRows)
    whole_sequences: bool = False
    accelerator: AcceleratorKv | None = None

    def __deepcopy__(self, memo: object) -> KvMemory:
        """Copies of a cache lie in the same tiers."""
        return self

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "a cache in tiers cannot be pickled: keep the tokens, or let the block keep prefixes "
            "in a file (prefixes=KeptPrefixes(...))"
        )

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in (*SMALL_TYPES, CODES):
            raise ConfigError(
                f"kv_dtype {self.dtype}: it is {', '.join(map(str, SMALL_TYPES))}, {CODES!r}, or "
                "None for the type of the states"
            )
        if self.whole_sequences and "kv" not in self.store.parts:
            raise ConfigError("whole_sequences needs the cache in tiers; give a policy of kv")
        if self.whole_sequences and not isinstance(
            policy := self.store.parts["kv"][0].policy, Interleave | Weighted
        ):
            raise ConfigError(
                f"whole_sequences: kv={policy} divides no sequence; leave it out, or give kv a "
                "policy that is weighted or interleaved"
            )

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with its pages in place.

        It is an ordinary one also where the caller infers: what is written there is written
        again later, outside of inference mode.

        Raises
        ------
        MemoryError
            A node has no room.
        """
        policy = self.store.parts["kv"][0].policy
        with torch.inference_mode(False):
            if self.whole_sequences and isinstance(policy, Interleave | Weighted) and all(shape):
                return self._by_sequence(shape, dtype, policy)
            made = self.store.empty("kv", 0, shape, dtype, pin=False)
        self.store.count(made, "kv", 0, made)
        return made

    def _by_sequence(
        self, shape: tuple[int, ...], dtype: torch.dtype, policy: Interleave | Weighted
    ) -> torch.Tensor:
        """A granule of the stripe is a sequence, which therefore begins with a page."""
        numbers = math.prod(shape[1:])
        granule = sequence_bytes(numbers * dtype.itemsize)
        memory = self.store.source.empty(
            (shape[0], granule // dtype.itemsize),
            dtype,
            replace(policy, granule_bytes=granule),
            pin=False,
        )
        self.store.count(memory, "kv", 0, memory)
        made: torch.Tensor = memory[:, :numbers].unflatten(1, shape[1:])  # type: ignore[no-untyped-call]
        return made


def sequence_bytes(nbytes: int) -> int:
    """What a sequence of so many bytes takes where it begins and ends with pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def kept_as(name: str | None) -> KeptAs:
    """What keys and values are kept as, by its name.

    Raises
    ------
    ConfigError
        It is none of :data:`SMALL_TYPES` and :data:`CODES`.
    """
    if name is None or name == CODES:
        return "int4" if name else None
    for dtype in SMALL_TYPES:
        if name == str(dtype).removeprefix("torch."):
            return dtype
    known = ", ".join(str(dtype).removeprefix("torch.") for dtype in SMALL_TYPES)
    raise ConfigError(
        f"kv_dtype {name or repr(name)}: it is {known} or {CODES}; leave it out for the model's own"
    )


def as_states(kept: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """What is kept in the type and on the device of states of the same width; a copy if need be."""
    if isinstance(kept, PartedStates):
        kept = kept.joined()
    if kept.dtype is torch.uint8:
        kept = decoded(kept, states.shape[-1], states.dtype)
    return kept.to(states)


def slack_of(positions: int) -> int:
    """Spare positions of memory that is made for so many."""
    return max(_LEAST_SLACK, positions // _SLACK_SHARE)


class RoomSource(Protocol):
    """Gives memory for what is kept as its ``dtype`` says."""

    @property
    def dtype(self) -> KeptAs:
        """As of :class:`KvMemory`."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor; MemoryError where there is no room."""


class KvRoom:
    """Memory for keys and values, in which the positions from ``begin`` to ``end`` are kept.

    Parameters
    ----------
    source
        Where the memory comes from.
    keys, values
        Shapes and types: ``(batch, heads, any, dim)``.
    positions
        Room at first.
    batch
        Sequences; None: as many as keys have.
    first
        Gives the first memory; None: the source does.
    """

    def __init__(
        self,
        source: RoomSource,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: int,
        batch: int | None = None,
        first: FirstRooms | None = None,
    ) -> None:
        self._source = source
        if source.dtype == CODES and keys.shape[-1] != values.shape[-1]:
            raise ConfigError(
                f"4-bit keys and values of widths {keys.shape[-1]} and {values.shape[-1]}: the "
                "kernel takes one; leave kv_dtype out"
            )
        wanted = (self._wanted(keys, positions, batch), self._wanted(values, positions, batch))
        if first is None:
            self._k, self._v = source.empty(*wanted[0]), source.empty(*wanted[1])
        else:
            self._k, self._v = first.pair(*wanted)
        self.part: RowPart | None = None
        """Only these rows are seen and written while it is set."""
        self.begin = 0
        self.end = 0

    def _wanted(self, states: torch.Tensor, positions: int, batch: int | None) -> Wanted:
        """The memory of states as they will be kept."""
        rows, heads, _, dim = states.shape
        kept = self._source.dtype
        shape = (batch or rows, heads, positions)
        if isinstance(kept, str):
            return (*shape, int4_row_bytes(dim)), torch.uint8
        return (*shape, dim), kept or states.dtype

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory of keys and of values, with the room for more."""
        return self._k, self._v

    @property
    def positions(self) -> int:
        """How many are kept."""
        return self.end - self.begin

    @property
    def capacity(self) -> int:
        """How many have room."""
        return int(min(self._k.shape[2], self._v.shape[2]))

    @property
    def free(self) -> int:
        """How many more have room behind the others."""
        return self.capacity - self.end

    def view(self, last: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the last positions, or of all; no copy."""
        begin = self.begin if last is None else max(self.begin, self.end - last)
        return self._at(self._k, begin, self.end), self._at(self._v, begin, self.end)

    def _at(self, tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        part = self.part
        if part is not None:
            tensor = tensor.narrow(0, part.begin, part.end - part.begin)
        return tensor.narrow(2, begin, end - begin)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write positions behind the others."""
        self.make_ready(keys.shape[2])
        self.take(self._kept_as(keys), self._kept_as(values))

    def take(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write positions as they are kept, for which there is room, behind the others."""
        end = self.end + keys.shape[2]
        self._at(self._k, self.end, end).copy_(keys)
        self._at(self._v, self.end, end).copy_(values)
        self.end = end

    def keep_last(self, positions: int) -> None:
        """Forget all before the last so many."""
        self.begin = max(self.begin, self.end - positions)

    def drop_last(self, positions: int) -> None:
        """Forget the last so many, of those that are kept."""
        self.end -= positions

    def stand(self) -> tuple[int, ...]:
        """What :meth:`append` changes, besides bytes."""
        return self.begin, self.end

    def go_back(self, stand: tuple[int, ...]) -> None:
        """Be as then, when no memory has been taken since."""
        self.begin, self.end = stand

    def make_ready(self, count: int) -> None:
        """Have room for so many more positions behind the others."""
        if self.end + count > self.capacity:
            self._make_room(self.positions + count)

    def _kept_as(self, states: torch.Tensor) -> torch.Tensor:
        """The largest of a small type in place of what is beyond it: float8_e5m2 has infinity."""
        kept = self._source.dtype
        if kept is None or kept is states.dtype:
            return states
        if isinstance(kept, str):
            return encoded(states)
        most = torch.finfo(kept).max
        return states.clamp(-most, most)

    def _make_room(self, needed: int) -> None:
        if needed <= self.capacity and self.begin >= slack_of(self.positions):
            self.to_front()
        else:
            self.resize(needed + slack_of(needed))

    def to_front(self) -> None:
        """Have all room behind what is kept."""
        if self.begin:
            self._move_to_front(self._k)
            self._move_to_front(self._v)
            self.begin, self.end = 0, self.positions

    def resize(self, capacity: int) -> None:
        """Move to memory for so many, at least as many as are kept."""
        self._replace(capacity, None)

    def reserve(self, positions: int) -> None:
        """Have room for so many positions, those before ``begin`` not counted."""
        if self.begin + positions > self.capacity:
            self._replace(positions, None)

    def select(self, rows: torch.Tensor) -> None:
        """Keep these sequences in this order, some perhaps twice; memory for as many is taken."""
        if rows.shape[0] != self._k.shape[0]:
            self._replace(self.capacity, rows)
            return
        for tensor in self.view():
            gather_rows(tensor, rows)

    def _replace(self, positions: int, rows: torch.Tensor | None) -> None:
        """Move to other memory, one after the other, so that never both are there twice."""
        kept = self.positions
        chosen = range(self._k.shape[0]) if rows is None else rows.tolist()

        def moved(old: torch.Tensor) -> torch.Tensor:
            shape = (len(chosen), old.shape[1], positions, old.shape[3])
            made = self._source.empty(shape, old.dtype)
            for at, row in enumerate(chosen):
                copy_whole(made[at, :, :kept], old[row, :, self.begin : self.end])
            return made

        self._k = moved(self._k)
        try:
            self._v = moved(self._v)
        except BaseException:
            if rows is None and self.begin:  # the keys begin elsewhere now
                self._move_to_front(self._v)
                self.begin, self.end = 0, kept
            raise
        self.begin, self.end = 0, kept

    def _move_to_front(self, tensor: torch.Tensor) -> None:
        """In steps that do not overlap."""
        step = self.begin
        for to in range(0, self.positions, step):
            count = min(step, self.positions - to)
            copy_whole(tensor[:, :, to : to + count], tensor[:, :, to + step : to + step + count])

    def copy(self) -> KvRoom:
        """The same positions in memory of their own."""
        made = copy.copy(self)
        made._replace(self.capacity, None)
        return made
