"""What lies where in a store, and the checksums by which it is believed.

It is a header, an index of one entry a slot, and the slots; each part begins at a multiple of 64
KiB. Numbers are little-endian. The header is written last when a store is made, and not again. An
entry is written after the block of its slot; it carries a checksum of that block, and one of itself
that also covers the slot's number and the store's random id, so that an entry that was torn, moved
or left over from another store is none.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from cxl_offload.files import parse_json
from cxl_offload.units import format_bytes

VERSION = 1
"""Of the format. A file of another one is dropped."""

HEADER_BYTES = ALIGN_BYTES = 64 << 10
ENTRY_BYTES = 128
LONGEST_KEY = 72

STORE_MARK, FREE_MARK = b"cxlkept\n", b"cxlfree\n"
"""The first word of a store, and, on a device, of the place of one that was dropped or is made."""

MARK_BYTES = 8
# Mark, version, bytes of facts, bytes of a block, slots, id. A digest of it and the facts follows.
_HEAD = struct.Struct("<8sIIQQ16s")
_DIGEST_BYTES = 16
_FACTS_AT = _HEAD.size + _DIGEST_BYTES
_LONGEST_FACTS = HEADER_BYTES - _FACTS_AT
# Sequence (0: no entry), length of the key, key, digest of the block. A digest of it follows.
_ENTRY = struct.Struct(f"<QB7x{LONGEST_KEY}s{_DIGEST_BYTES}s")
_SLOT = struct.Struct("<Q")
_LARGEST = 1 << 62


def digest(data: bytes | memoryview | bytearray) -> bytes:
    """The checksum of a block or an entry: 16 bytes of XXH3, which finds damage, not forgery."""
    return xxhash.xxh3_128_digest(data)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


class NoStoreError(ValueError):
    """A file is no store, or not one yet."""


@dataclass(frozen=True, slots=True)
class KeptLayout:
    """How many blocks of how many bytes.

    Raises
    ------
    ValueError
        One of them is no positive whole number, or the file would be larger than a file can be.
    """

    block_bytes: int
    slots: int

    def __post_init__(self) -> None:
        for name, value in (("block_bytes", self.block_bytes), ("slots", self.slots)):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _LARGEST:
                raise ValueError(f"a store with {name}={value!r}: a whole number from 1 to 2^62")
        if self.file_bytes >= _LARGEST:
            raise ValueError(f"a store of {format_bytes(self.file_bytes)}: no file is as large")

    @property
    def data_at(self) -> int:
        """Where the first slot begins."""
        return HEADER_BYTES + _aligned(self.slots * ENTRY_BYTES)

    @property
    def file_bytes(self) -> int:
        """Of the whole store."""
        return self.data_at + _aligned(self.slots * self.block_bytes)

    def data_address(self, mapping: mmap.mmap) -> int:
        """Of the first slot in this process, where the store is mapped."""
        return int(np.frombuffer(mapping, dtype=np.uint8, count=1).ctypes.data) + self.data_at

    def entry_at(self, slot: int) -> int:
        """Where the entry of a slot begins."""
        return HEADER_BYTES + slot * ENTRY_BYTES

    def block_at(self, slot: int) -> int:
        """Where a slot begins."""
        return self.data_at + slot * self.block_bytes

    @classmethod
    def within(cls, nbytes: int, block_bytes: int) -> KeptLayout:
        """As many slots as blocks of a kind fit into so many bytes, the index not counted."""
        slots = nbytes // block_bytes if isinstance(nbytes, int) and block_bytes else 0
        return cls(block_bytes, slots)


@dataclass(frozen=True, slots=True)
class KeptHeader:
    """What a file says of itself.

    Attributes
    ----------
    facts
        Everything besides the key that a block's contents depend on, name to value.
    id
        Random, made with the file.
    """

    layout: KeptLayout
    facts: Mapping[str, str]
    id: bytes

    def pack(self) -> bytes:
        """The bytes at the beginning.

        Raises
        ------
        ValueError
            The facts take more than the header has.
        """
        text = json.dumps(dict(self.facts), sort_keys=True).encode()
        if len(text) > _LONGEST_FACTS:
            raise ValueError(f"facts of {len(text)} bytes: a store has room for {_LONGEST_FACTS}")
        layout = self.layout
        head = _HEAD.pack(STORE_MARK, VERSION, len(text), layout.block_bytes, layout.slots, self.id)
        return head + digest(head + text) + text

    @staticmethod
    def id_in(view: memoryview) -> bytes:
        """The id of the store that lies there; empty where there is none."""
        mark, *_, id_ = _HEAD.unpack_from(view)
        return bytes(id_) if mark == STORE_MARK else b""

    @classmethod
    def unpack(cls, raw: bytes, nbytes: int, *, exact: bool = True) -> KeptHeader:
        """What the first :data:`HEADER_BYTES` say.

        Parameters
        ----------
        nbytes
            That there are. ``exact``: as many as the store has, as in a file; else at least.

        Raises
        ------
        ValueError
            With what is wrong, in a few words.
        """
        if len(raw) < _FACTS_AT or not raw.startswith(STORE_MARK):
            raise NoStoreError("it is no store, or was not finished")
        _, version, length, block_bytes, slots, id_ = _HEAD.unpack_from(raw)
        if version != VERSION:
            raise ValueError(f"it has format {version}, this version writes {VERSION}")
        text = raw[_FACTS_AT : _FACTS_AT + length]
        if digest(raw[: _HEAD.size] + text) != raw[_HEAD.size : _FACTS_AT]:
            raise ValueError("its header is damaged")
        facts = parse_json(text.decode(errors="replace"))
        if not isinstance(facts, dict):
            raise ValueError("its header is damaged")
        layout = KeptLayout(block_bytes, slots)
        if layout.file_bytes > nbytes or (exact and layout.file_bytes != nbytes):
            raise ValueError(
                f"it has {nbytes} bytes and should have {layout.file_bytes}: it was cut or grew"
            )
        return cls(layout, {str(name): str(value) for name, value in facts.items()}, id_)


@dataclass(frozen=True, slots=True)
class KeptEntry:
    """A block that is there.

    Attributes
    ----------
    sequence
        Counts the blocks that were written; of two the higher is younger.
    digest
        Of the block's bytes.
    """

    slot: int
    key: bytes
    sequence: int
    digest: bytes

    def pack(self, store_id: bytes) -> bytes:
        """The entry as it lies in the index of a store."""
        raw = _ENTRY.pack(self.sequence, len(self.key), self.key, self.digest)
        return raw + digest(store_id + _SLOT.pack(self.slot) + raw)

    @classmethod
    def unpack(cls, raw: bytes, slot: int, store_id: bytes) -> KeptEntry | None:
        """The entry of a slot; None where there is none that can be believed."""
        body = raw[: _ENTRY.size]
        sequence, length, key, block_digest = _ENTRY.unpack(body)
        if not (0 < sequence < _LARGEST and 0 < length <= LONGEST_KEY):
            return None
        expected = raw[_ENTRY.size : _ENTRY.size + _DIGEST_BYTES]
        if not is_right(store_id + _SLOT.pack(slot) + body, expected):
            return None
        return cls(slot, key[:length], sequence, block_digest)


def is_right(data: bytes | memoryview, expected: bytes) -> bool:
    """Whether bytes are those that a checksum was made of."""
    return digest(data) == expected


def sequences(index: memoryview, slots: int) -> NDArray[np.uint64]:
    """The first number of every entry, 0 where there is none: a view, not a copy."""
    words = np.frombuffer(index, dtype="<u8", count=slots * ENTRY_BYTES // 8)
    return words.reshape(slots, ENTRY_BYTES // 8)[:, 0]
