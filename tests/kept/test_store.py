"""What a store keeps, what it drops, and whom it refuses."""

from __future__ import annotations

import gc
import logging
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cxl_offload.kept import KeptBlocks, KeptLayout, KeptReader, KeptStore, private_file
from cxl_offload.kept.layout import LONGEST_KEY, VERSION
from tests.kept.ground import FACTS, LAYOUT, block_of, key_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def opened(path: Path, facts: dict[str, str] = FACTS, layout: KeptLayout = LAYOUT) -> KeptBlocks:
    return KeptBlocks(KeptStore(path, layout, facts))


def fill(path: Path, count: int = 5) -> list[bytes]:
    keys = [key_of(number) for number in range(count)]
    store = opened(path)
    for key in keys:
        store.put(key, block_of(key))
    store.close()
    return keys


def read_all(store: KeptBlocks) -> dict[bytes, bytes | None]:
    return {key: store.get(key) for key in store.keys}


def test_blocks_are_there_for_the_next_one_who_opens(path: Path) -> None:
    keys = fill(path)
    store = opened(path)
    assert read_all(store) == {key: block_of(key) for key in keys}
    assert store.get(key_of(9)) is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == LAYOUT.file_bytes
    store.close()


def test_full_store_drops_the_longest_unused_and_remembers_the_order(path: Path) -> None:
    fill(path, 8)
    store = opened(path)
    store.get(key_of(0))
    store.put(key_of(8), block_of(key_of(8)))
    assert key_of(0) in store, "it was used"
    assert key_of(1) not in store
    store.close()
    again = opened(path)
    assert again.keys == [key_of(number) for number in (0, 2, 3, 4, 5, 6, 7, 8)]
    again.close()


def test_block_that_is_written_again_is_there_once(path: Path) -> None:
    keys = fill(path, 3) + fill(path, 3)
    store = opened(path)
    assert len(store) == 3
    assert set(store.keys) == set(keys)
    store.close()


@pytest.mark.parametrize("name", ["model", "dtype", "tokenizer"])
def test_blocks_of_other_facts_are_dropped_and_the_difference_is_named(
    name: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(path)
    with caplog.at_level(logging.WARNING):
        store = opened(path, FACTS | {name: "other"})
    assert len(store) == 0
    store.close()
    (line,) = (record.message for record in caplog.records)
    assert str(path) in line
    assert f"{name} was {FACTS.get(name, 'not given')!r} and is 'other'" in line


def test_blocks_of_another_size_are_dropped(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(path)
    store = opened(path, layout=KeptLayout(1536, 9))
    assert len(store) == 0
    store.close()
    assert "8 blocks of 1536 bytes, 9 of 1536 are asked for" in caplog.text


@pytest.mark.parametrize("change", [-1, 1, -LAYOUT.file_bytes // 2])
def test_file_that_was_cut_or_grew_is_dropped(
    change: int, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(path)
    os.truncate(path, LAYOUT.file_bytes + change)
    with pytest.raises(ValueError, match="it was cut or grew"):
        KeptReader(path, FACTS)
    store = opened(path)
    assert len(store) == 0
    store.close()
    assert "it was cut or grew" in caplog.text


def test_file_of_another_version_is_dropped(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(path)
    with path.open("r+b") as file:
        file.seek(8)
        file.write((VERSION + 1).to_bytes(4, "little"))
    store = opened(path)
    assert len(store) == 0
    store.close()
    assert f"format {VERSION + 1}" in caplog.text


def test_damaged_block_is_named_and_dropped_and_the_others_stay(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = fill(path)
    store = opened(path)
    slot = next(entry.slot for entry in store.store.entries if entry.key == keys[2])
    store.store.block(slot)[700] ^= 1
    assert store.get(keys[2]) is None
    assert f"block {keys[2].hex()} is damaged" in caplog.text
    assert {key: data for key, data in read_all(store).items() if data is not None} == {
        key: block_of(key) for key in keys if key != keys[2]
    }
    store.close()
    again = opened(path)
    assert keys[2] not in again
    again.close()


def test_entries_of_another_store_are_not_believed(path: Path, tmp_path: Path) -> None:
    """As a file system may give them, that lost the order of its writes."""
    keys = fill(path)
    other = tmp_path / "other"
    opened(other).close()
    raw = bytearray(path.read_bytes())
    raw[:65536] = other.read_bytes()[:65536]
    path.write_bytes(raw)
    store = opened(path)
    assert not set(keys) & set(store.keys)
    store.close()


def test_detached_store_keeps_nothing_from_then_on(path: Path) -> None:
    fill(path)
    store = opened(path)
    store.store.detach()
    store.put(key_of(7), block_of(key_of(7)))
    assert store.get(key_of(7)) == block_of(key_of(7)), "it is there while the process lives"
    store.close()
    again = opened(path)
    assert len(again) == 0
    again.close()


def test_second_writer_is_refused_and_the_first_goes_on(path: Path) -> None:
    store = opened(path)
    with pytest.raises(BlockingIOError, match="another process writes"):
        opened(path)
    store.put(key_of(1), block_of(key_of(1)))
    store.close()
    again = opened(path)
    assert len(again) == 1
    again.close()


def test_forked_child_may_not_write(path: Path) -> None:
    store = opened(path)
    child = os.fork()
    if child == 0:
        try:
            store.put(key_of(1), block_of(key_of(1)))
        except RuntimeError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    store.close()


def make_fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def make_link(path: Path) -> None:
    target = path.with_name("target")
    fill(target)
    path.symlink_to(target)


def make_broken_link(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))


def make_open_to_all(path: Path) -> None:
    fill(path)
    path.chmod(0o644)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "make", [make_fifo, make_link, make_broken_link, Path.mkdir, make_open_to_all]
)
def test_what_is_no_private_file_is_refused_at_once(make, path: Path) -> None:  # type: ignore[no-untyped-def]
    make(path)
    with pytest.raises(OSError, match=r"."):
        opened(path)
    with pytest.raises(OSError, match=r"."):
        KeptReader(path, FACTS)
    assert os.path.lexists(path), "and nothing is removed"


def test_file_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(path)
    before = path.read_bytes()
    monkeypatch.setattr(private_file.os, "geteuid", lambda: os.getuid() + 1)
    for open_it in (opened, lambda path: KeptReader(path, FACTS)):
        with pytest.raises(PermissionError, match=f"belongs to user {os.getuid()}"):
            open_it(path)
    assert path.read_bytes() == before


def test_store_without_room_is_one_line_and_leaves_nothing(path: Path) -> None:
    with pytest.raises(MemoryError, match="ask for less"):
        opened(path, layout=KeptLayout(1 << 30, 1 << 30))
    assert not path.exists()


def test_preparation_that_fails_leaves_nothing(path: Path) -> None:
    def full(mapping: object, is_new: bool) -> None:
        raise MemoryError("node 2 is full")

    with pytest.raises(MemoryError, match="node 2"):
        KeptStore(path, LAYOUT, FACTS, prepare=full)
    assert not path.exists()


@pytest.mark.parametrize("key", [b"", b"x" * (LONGEST_KEY + 1)])
def test_key_that_does_not_fit_is_refused(key: bytes, path: Path) -> None:
    store = opened(path)
    with pytest.raises(ValueError, match="1 to 72"):
        store.put(key, bytes(LAYOUT.block_bytes))
    store.put(key_of(1), block_of(key_of(1)))
    with pytest.raises(ValueError, match="block of 3 bytes"):
        store.put(key_of(2), b"abc")
    assert [key for key, data in read_all(store).items() if data is not None] == [key_of(1)]
    store.close()


def test_address_is_that_of_the_first_slot(path: Path) -> None:
    keys = fill(path, 1)
    store = opened(path)
    (entry,) = store.store.entries
    assert store.store.address % 4096 == 0
    at = store.store.address + entry.slot * LAYOUT.block_bytes
    found = np.ctypeslib.as_array(
        (np.ctypeslib.ctypes.c_uint8 * LAYOUT.block_bytes).from_address(at)
    )
    assert found.tobytes() == block_of(keys[0])
    store.close()


@pytest.mark.parametrize("slot", [-1, LAYOUT.slots, 1 << 60])
def test_slots_that_are_not_there_are_refused_and_the_index_stays(path: Path, slot: int) -> None:
    keys = fill(path)
    store = KeptStore(path, LAYOUT, FACTS)
    for call in (
        lambda: store.write_block(slot, bytes(LAYOUT.block_bytes)),
        lambda: store.erase(slot),
        lambda: store.commit(slot, b"k"),
        lambda: store.block(slot),
    ):
        with pytest.raises(IndexError, match="slot"):
            call()
    store.close()
    again = opened(path)
    assert set(again.keys) == set(keys)
    again.close()


def test_store_that_nobody_closed_gives_its_lock_back(path: Path) -> None:
    store = KeptStore(path, LAYOUT, FACTS)
    block = store.block(0)
    store.close()
    store.close()
    KeptStore(path, LAYOUT, FACTS).commit(1, b"k")  # dropped without close
    gc.collect()
    opened(path).close()
    del block


def test_reader_is_closed_twice(path: Path) -> None:
    fill(path)
    reader = KeptReader(path, FACTS)
    reader.close()
    reader.close()


@pytest.mark.parametrize("value", [0, -1, 1 << 62, 1.5, True, "8", None])
def test_layout_of_no_whole_number_is_refused(value: Any) -> None:
    for name in ("block_bytes", "slots"):
        sizes: Any = {"block_bytes": 8, "slots": 8} | {name: value}
        with pytest.raises(ValueError, match=f"{name}=.*a whole number from 1 to 2.62"):
            KeptLayout(**sizes)


def test_facts_that_are_no_texts_are_refused_and_nothing_is_locked(path: Path) -> None:
    opened(path).close()
    wrong: Any = {"a": 1}
    with pytest.raises(TypeError, match="facts of a store are texts"):
        KeptStore(path, LAYOUT, wrong)
    opened(path).close()


def test_error_while_it_is_opened_leaves_no_lock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(path).close()
    with monkeypatch.context() as patched:
        patched.setattr("cxl_offload.kept.place.FilePlace.header", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            opened(path)
    opened(path).close()


def test_key_that_is_no_bytes_is_refused(path: Path) -> None:
    store = KeptStore(path, LAYOUT, FACTS)
    key: Any = "text"
    with pytest.raises(TypeError, match="a key is bytes, not str"):
        store.commit(0, key)
    store.close()
