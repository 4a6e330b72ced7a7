"""Opening a store to write or to read, its slots under way, and its end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cxl_offload.kept import (
    KeptBlocks,
    KeptLayout,
    KeptReader,
    KeptStore,
    WrittenByAnotherError,
    open_or_read,
)
from tests.kept.ground import FACTS, LAYOUT, block_of, key_of


def test_second_one_reads_what_the_first_writes(tmp_path: Path) -> None:
    first = open_or_read(tmp_path / "store", LAYOUT, FACTS)
    second = open_or_read(tmp_path / "store", LAYOUT, FACTS)
    assert isinstance(first, KeptStore)
    assert isinstance(second, KeptReader)
    books = KeptBlocks(first)
    books.put(key_of(1), block_of(key_of(1)))
    second.refresh()
    assert second.read(key_of(1)) == block_of(key_of(1))
    second.close()
    books.close()
    third = open_or_read(tmp_path / "store", LAYOUT, FACTS)
    assert isinstance(third, KeptStore)
    third.close()


def test_store_of_something_else_that_is_written_is_refused_and_stays(tmp_path: Path) -> None:
    first = open_or_read(tmp_path / "store", LAYOUT, FACTS)
    with pytest.raises(WrittenByAnotherError, match="dtype was 'bfloat16' and is 'float32'"):
        open_or_read(tmp_path / "store", LAYOUT, FACTS | {"dtype": "float32"})
    other = KeptLayout(block_bytes=2 * LAYOUT.block_bytes, slots=LAYOUT.slots)
    with pytest.raises(WrittenByAnotherError, match="it has other blocks"):
        open_or_read(tmp_path / "store", other, FACTS)
    first.close()
    assert (tmp_path / "store").exists()


def test_slot_under_way_is_in_no_index_and_goes_to_nobody(tmp_path: Path) -> None:
    books = KeptBlocks(KeptStore(tmp_path / "store", LAYOUT, FACTS))
    for number in range(LAYOUT.slots):
        books.put(key_of(number), block_of(key_of(number)))
    slot = books.begin(key_of(20))
    assert books.slots_left == LAYOUT.slots - 1
    assert key_of(0) not in books, "it was the longest unused"
    for number in range(30, 30 + 2 * LAYOUT.slots):
        books.put(key_of(number), block_of(key_of(number)))
        assert books.find(key_of(number)) != slot
    books.store.write_block(slot, block_of(key_of(20)))
    books.finish(slot, key_of(20))
    assert books.find(key_of(20)) == slot
    begun = books.begin(key_of(21))
    books.abandon(begun)
    assert key_of(21) not in books
    assert books.slots_left == LAYOUT.slots
    books.close()


def test_store_whose_folder_was_removed_closes(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    store = KeptStore(tmp_path / "folder" / "store", LAYOUT, FACTS)
    store.flush()
    shutil.rmtree(tmp_path / "folder")
    with pytest.raises(FileNotFoundError):
        store.flush()
    store.close()
