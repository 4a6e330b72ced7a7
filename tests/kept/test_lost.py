"""Pages of a store that fail: the blocks on them are dropped, and their slots are used no more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxl_offload.kept import KeptBlocks, KeptLayout, KeptReader, KeptStore, kept_path
from cxl_offload.memory import lost_memory, survive_memory_errors
from tests.memory.failures import lose

from .ground import FACTS, block_of, key_of

PAGE = 4096
LAYOUT = KeptLayout(block_bytes=2 * PAGE, slots=4)


@pytest.fixture(params=[True, False], ids=["interrupted", "quiet"], autouse=True)
def surviving(request: pytest.FixtureRequest) -> Iterator[None]:
    with survive_memory_errors(interrupt=request.param):
        yield


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return kept_path("test", tmp_path)


@pytest.fixture
def books(path: Path) -> Iterator[KeptBlocks]:
    books = KeptBlocks(KeptStore(path, LAYOUT, FACTS))
    for number in range(3):
        put(books, number)
    yield books
    books.close()


def put(books: KeptBlocks, number: int) -> None:
    books.put(key_of(number), block_of(key_of(number), LAYOUT))


def address_of(books: KeptBlocks, slot: int) -> int:
    return books.store.address + slot * LAYOUT.block_bytes


def lose_block(books: KeptBlocks, number: int) -> int:
    slot = books.find(key_of(number))
    assert slot is not None
    lose(address_of(books, slot) + PAGE)
    return slot


def numbers_in(books: KeptBlocks) -> list[int]:
    """Of the right blocks that are found."""
    return [
        number
        for number in range(12)
        if books.get(key_of(number)) == block_of(key_of(number), LAYOUT)
    ]


def test_lost_block_is_dropped_and_its_slot_used_no_more(books: KeptBlocks, path: Path) -> None:
    lost = lose_block(books, 1)
    assert numbers_in(books) == [0, 2]
    assert (books.damaged, books.slots_left) == (1, 3)
    assert lost_memory() == ()
    for number in range(4, 12):
        put(books, number)
        assert books.find(key_of(number)) not in {lost, None}
    assert numbers_in(books) == [9, 10, 11]
    books.close()
    with_next = KeptBlocks(KeptStore(path, LAYOUT, FACTS))
    assert numbers_in(with_next) == [9, 10, 11]
    with_next.close()


def test_block_whose_memory_fails_while_it_is_written_is_not_kept(books: KeptBlocks) -> None:
    slot = books.begin(key_of(5))
    books.store.write_block(slot, block_of(key_of(5), LAYOUT))
    lose(address_of(books, slot))
    assert not books.finish(slot, key_of(5))
    assert books.get(key_of(5)) is None
    slot = books.begin(key_of(6))
    lose(address_of(books, slot))
    books.abandon(slot)
    assert (numbers_in(books), books.slots_left) == ([1, 2], 2)


def test_store_whose_slots_are_all_lost_keeps_nothing(books: KeptBlocks) -> None:
    for slot in range(LAYOUT.slots):
        lose(address_of(books, slot))
    put(books, 7)
    assert (numbers_in(books), books.slots_left, len(books)) == ([], 0, 0)


def test_lost_page_of_the_index_costs_this_process_nothing(books: KeptBlocks) -> None:
    lose(books.store.address - LAYOUT.data_at + PAGE)
    put(books, 3)
    assert numbers_in(books) == [0, 1, 2, 3]
    assert lost_memory() == ()


def test_file_that_is_cut_finds_nothing(books: KeptBlocks, path: Path) -> None:
    os.truncate(path, LAYOUT.block_at(0))
    assert numbers_in(books) == []
    put(books, 3)
    assert (books.slots_left, books.store.is_gone) == (0, True)
    os.truncate(path, LAYOUT.file_bytes)


def test_reader_does_not_find_a_lost_block(books: KeptBlocks, path: Path) -> None:
    reading = KeptReader(path, FACTS)
    entry = reading.find(key_of(0))
    assert entry is not None
    lose(reading.address + entry.slot * LAYOUT.block_bytes)
    found = [reading.read(key_of(number)) is not None for number in range(3)]
    assert found == [False, True, True]
    reading.close()
