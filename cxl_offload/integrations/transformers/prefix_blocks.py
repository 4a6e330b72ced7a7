"""Blocks of tokens between a cache and a store: found, read into every layer, and written.

A block is the keys and values of all layers of some tokens, before they are rounded or dropped by
whatever cache takes them. What a cache is given by the model is written to slots as it comes, and
what is read is given to the cache as the model would give it; so all caches are the same here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache

from cxl_offload.errors import LostMemory, MemoryLostError
from cxl_offload.integrations.transformers.current_rows import CurrentRows
from cxl_offload.integrations.transformers.prefix_keys import PromptRow
from cxl_offload.kept import KeptBlocks, KeptReader, KeptStore
from cxl_offload.ops.view import untraced

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class FoundBlocks:
    """Blocks that were found for the rows of a batch.

    Attributes
    ----------
    data
        ``(blocks, layers, 2, heads, tokens, width)``: those of the store, or copies.
    rows
        For each row, the numbers of its blocks in ``data``, in order.
    """

    data: torch.Tensor
    rows: list[list[int]]

    def read_into(
        self, cache: Cache, rows: Sequence[PromptRow], columns: int, device: torch.device
    ) -> None:
        """Give a cache the first columns of a batch, a layer at a time; padding is zeros."""
        _, layers, _, heads, tokens, width = self.data.shape
        for layer in range(layers):
            given = self.data.new_empty((2, len(rows), heads, columns, width))
            for number, (row, blocks) in enumerate(zip(rows, self.rows, strict=True)):
                own = given[:, number]
                own[:, :, : row.padding].zero_()
                full, rest = divmod(max(0, columns - row.padding), tokens)
                end = row.padding + full * tokens
                if full:  # (blocks, 2, heads, tokens, width): blocks stand behind each other
                    parts = self.data[torch.tensor(blocks[:full]), layer].permute(1, 2, 0, 3, 4)
                    own[:, :, row.padding : end].unflatten(2, (full, tokens)).copy_(parts)  # type: ignore[no-untyped-call]
                if rest:
                    own[:, :, end:].copy_(self.data[blocks[full], layer, :, :, :rest])
            keys, values = given.to(device).unbind()
            cache.update(keys, values, layer)


@dataclass(slots=True)
class NewBlock:
    """A block that is being computed: whose, where its columns begin, and its slot."""

    row: int
    column: int
    slot: int
    key: bytes


@dataclass(slots=True)
class PrefixRecording:
    """Copies what a cache is given by the model to the slots of new blocks.

    Attributes
    ----------
    data
        As of :class:`FoundBlocks`, of all slots.
    first
        The first column that the model computes.
    broken
        Why nothing of it can be kept; empty: it can.
    """

    data: torch.Tensor
    blocks: list[NewBlock]
    first: int
    columns: int
    batch: int
    current: CurrentRows
    broken: str = ""
    rows_seen: dict[int, int] = field(default_factory=dict)

    def take(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        """New positions of a layer, of all rows or of the part that is computed now."""
        _, layers, _, heads, tokens, width = self.data.shape
        part = self.current.part
        begin, end = (0, self.batch) if part is None else (part.begin, part.end)
        expected = (end - begin, heads, self.columns - self.first, width)
        for states in (keys, values):
            if tuple(states.shape) != expected or states.dtype is not self.data.dtype:
                self.broken = (
                    f"layer {layer} gives states {tuple(states.shape)} of {states.dtype}, not "
                    f"{expected} of {self.data.dtype}"
                )
        if layer >= layers:
            self.broken = f"there are more than {layers} layers"
        if self.broken:
            return
        self.rows_seen[layer] = self.rows_seen.get(layer, 0) + end - begin
        for block in self.blocks:
            if begin <= block.row < end:
                at = block.column - self.first
                target = self.data[block.slot, layer]
                target[0].copy_(keys[block.row - begin, :, at : at + tokens])
                target[1].copy_(values[block.row - begin, :, at : at + tokens])

    @property
    def why_not(self) -> str:
        """Why its blocks are not to be kept; empty: they are complete."""
        layers = self.data.shape[1]
        if not self.broken and self.rows_seen != dict.fromkeys(range(layers), self.batch):
            return f"not every one of {layers} layers gave states of every row"
        return self.broken


# Apart from what calls it: torch keeps a marked function in a cycle with what it refers to.
@untraced
def _take(recording: PrefixRecording, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
    recording.take(keys, values, layer)


@contextlib.contextmanager
def recorded(cache: Cache, recording: PrefixRecording) -> Iterator[None]:
    """What the model gives a cache in the block goes to the recording too."""
    update: Callable[..., Any] = cache.update

    def both(keys: Any, values: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        _take(recording, keys, values, layer_idx)
        return update(keys, values, layer_idx, *args, **kwargs)

    cache.update = both
    try:
        yield
    finally:
        del cache.update


class PrefixBlocks:
    """The blocks of a store as tensors.

    Parameters
    ----------
    store
        Belongs to this object from now on.
    shape
        Layers, heads, tokens and width of a block.
    dtype
        Of keys and values.

    Attributes
    ----------
    damaged
        Blocks that were found damaged.
    """

    def __init__(
        self, store: KeptStore | KeptReader, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        layers, heads, tokens, width = shape
        self._shape = (layers, 2, heads, tokens, width)
        self._dtype = dtype
        self._lock = threading.Lock()
        self._reader = store if isinstance(store, KeptReader) else None
        self._books = KeptBlocks(store) if isinstance(store, KeptStore) else None
        self._all: torch.Tensor | None = None
        if isinstance(store, KeptStore):
            layout = store.layout
            nbytes = layout.slots * layout.block_bytes
            with torch.inference_mode(False):  # it is written to outside of such a block too
                raw = torch.frombuffer(
                    store.mapping, dtype=torch.uint8, count=nbytes, offset=layout.data_at
                )
                self._all = self._tensor(raw)

    def _tensor(self, raw: torch.Tensor) -> torch.Tensor:
        return raw.view(self._dtype).view(-1, *self._shape)

    @property
    def damaged(self) -> int:
        return 0 if self._books is None else self._books.damaged

    def __len__(self) -> int:
        return len(self._reader if self._books is None else self._books)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def found(self, rows: Sequence[PromptRow]) -> Iterator[FoundBlocks]:
        """The blocks that the rows begin with; right as long as the context lasts.

        Raises
        ------
        MemoryLostError
            At its end: the memory of one of them failed meanwhile. It will not be found again.
        """
        with self._lock:
            found = self._in_place(rows) if self._books is not None else self._copied(rows)
            yield found
            if self._books is not None:
                _refuse_lost(self._books.store, {slot for row in found.rows for slot in row})

    def _in_place(self, rows: Sequence[PromptRow]) -> FoundBlocks:
        books = self._books
        slots: dict[bytes, int | None] = {}
        assert books is not None
        assert self._all is not None

        def slot_of(key: bytes) -> int | None:
            if key not in slots:
                slots[key] = books.find(key)
            return slots[key]

        return FoundBlocks(self._all, [_first_of(row, slot_of) for row in rows])

    def _copied(self, rows: Sequence[PromptRow]) -> FoundBlocks:
        reader = self._reader
        copies: list[bytes] = []
        numbers: dict[bytes, int | None] = {}
        assert reader is not None
        reader.refresh()

        def number_of(key: bytes) -> int | None:
            if key not in numbers:
                data = reader.read(key)
                numbers[key] = None if data is None else len(copies)
                copies.extend([] if data is None else [data])
            return numbers[key]

        found = [_first_of(row, number_of) for row in rows]
        raw = torch.frombuffer(bytearray(b"".join(copies)), dtype=torch.uint8) if copies else None
        data = torch.empty((0, *self._shape), dtype=self._dtype)
        return FoundBlocks(data if raw is None else self._tensor(raw), found)

    @contextlib.contextmanager
    def writing(
        self,
        cache: Cache,
        rows: Sequence[PromptRow],
        first: int,
        columns: int,
        current: CurrentRows,
    ) -> Iterator[list[NewBlock]]:
        """What a cache is given in the block is kept at its end; nothing where that fails.

        Parameters
        ----------
        first, columns
            The first column that is computed, and how many there are.
        current
            Says which rows are computed.

        Yields
        ------
        list of NewBlock
            What is to be kept; empty afterwards where it was not.
        """
        books = self._books
        if books is None or self._all is None:
            yield []
            return
        with self._lock:
            new = self._begun(books, rows, first)
        recording = PrefixRecording(self._all, new, first, columns, len(rows), current)
        try:
            with recorded(cache, recording):
                yield new
        except BaseException:
            recording.broken = "the prompt was not computed to its end"
            raise
        finally:
            with self._lock:
                _end(books, recording, new)
                _touch(books, rows)

    def _begun(self, books: KeptBlocks, rows: Sequence[PromptRow], first: int) -> list[NewBlock]:
        """Slots for blocks that are not there: the beginnings of all rows before their ends."""
        tokens = self._shape[3]
        wanted: dict[bytes, tuple[int, int]] = {}
        for block in range(max((len(row.keys) for row in rows), default=0)):
            for number, row in enumerate(rows):
                column = row.padding + block * tokens
                if block < len(row.keys) and row.keys[block] not in books and column >= first:
                    wanted.setdefault(row.keys[block], (number, column))
        # Of this prompt's own blocks none has to go for another.
        held = {key for row in rows for key in row.keys if key in books}
        most = books.slots_left - len(held)
        _touch(books, rows)
        return [
            NewBlock(row, column, books.begin(key), key)
            for key, (row, column) in list(wanted.items())[: max(0, most)]
        ]

    def close(self) -> None:
        """Lets another process write."""
        self._all = None
        for store in (self._books, self._reader):
            if store is not None:
                store.close()


def _first_of(row: PromptRow, find: Callable[[bytes], int | None]) -> list[int]:
    found: list[int] = []
    for key in row.keys[: row.usable]:
        number = find(key)
        if number is None:
            break
        found.append(number)
    return found


def _refuse_lost(store: KeptStore, slots: set[int]) -> None:
    failed = slots if store.is_gone else slots & store.lost_slots
    if failed:
        layout = store.layout
        name, nbytes = f"kept blocks in {store.path}", layout.block_bytes
        losses = [
            LostMemory(name, layout.block_at(slot), nbytes, None, store.address + slot * nbytes)
            for slot in sorted(failed)
        ]
        raise MemoryLostError(losses, is_whole=True)


def _touch(books: KeptBlocks, rows: Sequence[PromptRow]) -> None:
    """The beginning of a text goes last: without it the rest is not found."""
    for row in rows:
        for key in reversed(row.keys):
            if key in books:
                books.touch(key)


def _end(books: KeptBlocks, recording: PrefixRecording, new: list[NewBlock]) -> None:
    why = recording.why_not
    if why:
        for block in new:
            books.abandon(block.slot)
        if new:
            _log.warning("prefixes of this prompt are not kept: %s", why)
        new.clear()
    else:
        new[:] = [block for block in new if books.finish(block.slot, block.key)]
