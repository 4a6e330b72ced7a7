"""Which chunks were seen of late, and when: an index of a fixed size that holds no blocks."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

_WAYS = 4
"""Entries that a key may lie in; the one not seen for the longest makes room."""

_TIME_BITS = 39
_TIME = (1 << _TIME_BITS) - 1
_BACK = 1 << _TIME_BITS
_TAG_SHIFT = _TIME_BITS + 1
_TAG_BITS = 64 - _TAG_SHIFT

LEAST_ENTRIES, MOST_ENTRIES = 1 << 12, 1 << 22
"""32 KiB and 32 MiB."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """When a chunk was last seen, and whether it has come back since it was first seen."""

    at: int
    came_back: bool


class Sightings:
    """Keys to sightings, in 8 bytes each; keys not seen for long are forgotten.

    A key is known by 24 bits and its bucket, so that one in some millions that were never seen is
    taken for another. That is good enough for a guess, and for nothing else.

    Parameters
    ----------
    chunks
        How many of the last keys are to be found again. There are four times as many entries,
        which loses few of them to collisions, and at most :data:`MOST_ENTRIES`.
    """

    def __init__(self, chunks: int) -> None:
        entries = 1 << (4 * chunks - 1).bit_length()
        entries = min(max(entries, LEAST_ENTRIES), MOST_ENTRIES)
        self._entries = array("Q", bytes(8 * entries))
        self._buckets = entries // _WAYS

    @property
    def nbytes(self) -> int:
        """What the index takes, however many keys it has seen."""
        return len(self._entries) * self._entries.itemsize

    def find(self, key: bytes) -> Sighting | None:
        """What is known of a key."""
        tag, first = self._place(key)
        for entry in self._entries[first : first + _WAYS]:
            if entry >> _TAG_SHIFT == tag:
                return Sighting(entry & _TIME, bool(entry & _BACK))
        return None

    def add(self, key: bytes, seen: Sighting) -> None:
        """Replaces what is known of a key, or of the one that was not seen for the longest."""
        tag, first = self._place(key)
        bucket = self._entries[first : first + _WAYS]
        tags = [entry >> _TAG_SHIFT for entry in bucket]
        oldest = min(range(_WAYS), key=lambda way: bucket[way] & _TIME)
        way = tags.index(tag) if tag in tags else oldest
        back = _BACK if seen.came_back else 0
        self._entries[first + way] = tag << _TAG_SHIFT | back | (seen.at & _TIME)

    def _place(self, key: bytes) -> tuple[int, int]:
        """Tag, never 0, which is that of an empty entry, and first entry of the bucket."""
        number = hash(key)
        tag = (number >> 8) % ((1 << _TAG_BITS) - 1) + 1
        return tag, (number >> 32) % self._buckets * _WAYS
