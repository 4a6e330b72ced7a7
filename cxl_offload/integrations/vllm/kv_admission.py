"""Whether chunks that were never seen before are worth storing: by how many come back.

A store is paid when it is made, and pays when the chunk is read. What a chunk that comes back
gains by being stored when it is first seen, rather than when it is seen the second time, is one
read. So chunks seen before are always stored, and new ones as long as enough new ones come back.
An index of what was seen, stored or not, counts those: nothing has to be stored to find out that
a load has changed.

Counted is what a store would have gained: a chunk that a request looked up, because the KV cache
did not have it, within as many new chunks as the largest tier holds, for the first time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cxl_offload.integrations.vllm.kv_sightings import Sighting, Sightings

_logger = logging.getLogger(f"vllm.{__name__}")

Rule = Literal["adaptive", "all"]
"""``"all"`` stores every chunk."""

STOPS_BELOW, BEGINS_ABOVE = 1 / 32, 1 / 16
"""Shares of new chunks that come back: below the one new chunks are no longer stored, above the
other they are again. Between them nothing changes, so that a load in between does not flap.

What a store costs, as a share of the prefill of its chunk, differs: copies took 0.2 to 0.5 % of the
CPU time of the model on two cores, and a whole run was once slower by 5 %. Storing pays from a
share that is as large as that cost. At 1/32, storing on loses 2 % at most if the cost is 5 %, and
to stop loses 3 % at most if it is nothing.
"""

_LEAST_WINDOW = 256
"""New chunks that the share is a mean of, at least: some prompts, not one."""

_REACH_FORGETS = 1 / 2048
"""Of what is known of how long chunks stay away, by each that comes back sooner."""


@dataclass(slots=True)
class RequestPrefix:
    """What is known of one request, in chunks from its beginning.

    Attributes
    ----------
    looked_up_from
        Token at which the first chunk ends that the KV cache did not have; None: it had all.
    judged, admitted
        How many were asked about, and how many of them may be stored. Behind a chunk that is not,
        none is: it would never be found.
    is_whole
        All of it is wanted, by a tier that was promised so.
    """

    looked_up_from: int | None = None
    judged: int = 0
    admitted: int = 0
    is_whole: bool = False


class Admission:
    """Decides which chunks of a request are stored; always the beginning of it.

    It begins by storing everything, and stops when new chunks no longer come back: where none ever
    did, after as many as half the largest tier holds, else after twice as many as there usually
    are before one comes back.

    Parameters
    ----------
    chunks
        How many the largest tier holds.
    chunk_tokens
        Tokens of a chunk.

    Raises
    ------
    ValueError
        Fewer chunks than 0 or tokens than 1. The options of the connector refuse what leads to
        such, so this is an error of the caller.

    Attributes
    ----------
    stores_new
        Whether chunks that were never seen before are stored.
    share
        Of new chunks, how many come back; 1 to begin with.
    """

    def __init__(self, chunks: int, chunk_tokens: int) -> None:
        if chunks < 0 or chunk_tokens < 1:
            raise ValueError(
                f"admission over {chunks} chunks of {chunk_tokens} tokens: at least 0 of at least 1"
            )
        self._chunk_tokens = chunk_tokens
        self._horizon = chunks
        self._sightings = Sightings(chunks)
        self._new = 0  # so many new chunks were seen; the clock of the sightings
        self._reach = chunks / 4
        self.stores_new = True
        self.share = 1.0
        self._has_prefixes = True

    @property
    def nbytes(self) -> int:
        """What the index of chunks takes."""
        return self._sightings.nbytes

    def looked_up(self, request: RequestPrefix, end: int | None) -> None:
        """Notes that the KV cache did not have the chunk that ends at this token."""
        if end is not None and (request.looked_up_from is None or end < request.looked_up_from):
            request.looked_up_from = end

    def loaded(self, request: RequestPrefix, keys: Sequence[bytes], ends: Sequence[int]) -> None:
        """Notes chunks that were read out of a tier."""
        for key in keys:
            found = self._sightings.find(key)
            # One that is not known is of an engine before this one, or was forgotten long ago.
            self._saw(key, found or Sighting(0, came_back=False), was_missed=True)
        there = max(ends, default=0) // self._chunk_tokens
        request.judged = max(request.judged, there)
        request.admitted = max(request.admitted, there)

    def admit(
        self, request: RequestPrefix, keys: Sequence[bytes], ends: Sequence[int | None]
    ) -> list[bool]:
        """Whether each of these chunks may be stored.

        Parameters
        ----------
        keys, ends
            Of chunks of the request in their order, with the tokens at which they end. Chunks of
            before may be among them, and get the same answer.
        """
        if not self._has_prefixes or request.is_whole:
            return [True] * len(keys)
        was_refused = request.admitted < request.judged
        for key, end in zip(keys, ends, strict=True):
            number = 0 if end is None or end % self._chunk_tokens else end // self._chunk_tokens
            if not 0 < number <= request.judged + 1:
                # Windows or states: there is no beginning that all else is useless without.
                self._has_prefixes, self.stores_new = False, True
                _logger.info("KV offload: chunks of this model are no prefixes; all are stored")
                return [True] * len(keys)
            if number <= request.judged:
                continue
            request.judged = number
            is_known = self._sees(key, end, request)
            if not was_refused and (is_known or self.stores_new):
                request.admitted = number
        return [(end or 0) // self._chunk_tokens <= request.admitted for end in ends]

    def _sees(self, key: bytes, end: int | None, request: RequestPrefix) -> bool:
        """Notes a chunk that is about to be stored; whether it was seen while a tier kept it."""
        found = self._sightings.find(key)
        if found is not None and self._new - found.at <= self._horizon:
            start = request.looked_up_from
            self._saw(key, found, was_missed=start is not None and (end or 0) >= start)
            return True
        self._new += 1
        self.share -= self.share / self._window
        if self.share < STOPS_BELOW:
            self.stores_new = False
        self._sightings.add(key, Sighting(self._new, came_back=False))
        return False

    def _saw(self, key: bytes, found: Sighting, *, was_missed: bool) -> None:
        """A chunk again: counts it where a store would have gained something, the first time."""
        away = self._new - found.at
        counts = was_missed and not found.came_back and away <= self._horizon
        if counts:
            self._reach = max(float(away), self._reach + (away - self._reach) * _REACH_FORGETS)
            self.share = min(1.0, self.share + 1 / self._window)
            if self.share > BEGINS_ABOVE:
                self.stores_new = True
        self._sightings.add(key, Sighting(self._new, came_back=found.came_back or counts))

    @property
    def _window(self) -> float:
        """New chunks that the share is a mean of.

        Half of what passes before chunks come back: in a pause of that length the share falls to a
        seventh, so that what all come back to does not stop; without end it stops after 1.7 times
        that length.
        """
        return max(float(_LEAST_WINDOW), self._reach / 2)
