"""The index of chunks that were seen: what it finds, forgets, and takes. No vLLM."""

from __future__ import annotations

import hashlib
import tracemalloc

import pytest

from cxl_offload.integrations.vllm.kv_sightings import (
    LEAST_ENTRIES,
    MOST_ENTRIES,
    Sighting,
    Sightings,
)


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "big")).digest()


def test_keys_of_late_are_found_as_they_were_seen() -> None:
    seen = Sightings(1000)
    for number in range(20_000):
        seen.add(key(number), Sighting(number + 1, came_back=number % 3 == 0))
    found = {number: seen.find(key(number)) for number in range(19_000, 20_000)}
    right = [number for number, sighting in found.items() if sighting is not None]
    assert len(right) > 0.99 * 1000
    assert all(found[number] == Sighting(number + 1, number % 3 == 0) for number in right)
    assert sum(seen.find(key(number)) is not None for number in range(5000)) < 50, "it forgets"
    assert not any(seen.find(key(number)) for number in range(10**6, 10**6 + 5000))


def test_key_that_is_seen_again_takes_no_second_entry() -> None:
    seen = Sightings(10)
    for at in range(1, 20_000):
        seen.add(b"one", Sighting(at, came_back=at % 2 == 0))
    assert seen.find(b"one") == Sighting(19_999, came_back=False)
    assert sum(entry != 0 for entry in seen._entries) == 1


def test_time_does_not_run_over() -> None:
    seen = Sightings(10)
    late = (1 << 39) - 1
    seen.add(b"late", Sighting(late, came_back=True))
    assert seen.find(b"late") == Sighting(late, came_back=True)


@pytest.mark.parametrize(
    ("chunks", "entries"),
    [(1, LEAST_ENTRIES), (2000, 8192), (2048, 8192), (2049, 16384), (1 << 40, MOST_ENTRIES)],
)
def test_memory_is_that_of_the_tier_and_bounded(chunks: int, entries: int) -> None:
    assert Sightings(chunks).nbytes == 8 * entries <= 32 << 20


def test_memory_does_not_grow_with_what_is_seen() -> None:
    tracemalloc.start()
    try:
        seen = Sightings(1000)
        before, _ = tracemalloc.get_traced_memory()
        for number in range(20_000):
            seen.add(number.to_bytes(8, "big"), Sighting(number, came_back=False))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 4096
    assert before > seen.nbytes, "the index was counted"
