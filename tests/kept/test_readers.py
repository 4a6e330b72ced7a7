"""Readers beside a writer: what they get is right, or nothing."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from cxl_offload.kept import KeptBlocks, KeptReader, KeptStore, reader
from tests.kept.ground import FACTS, KEYS, LAYOUT, block_of, key_of


def write_for_ever(path: Path, seed: int) -> int:
    """A process that puts blocks into the store until it is killed."""
    child = os.fork()
    if child == 0:
        try:
            numbers = random.Random(seed)
            contents = {key_of(number): block_of(key_of(number)) for number in range(KEYS)}
            store = KeptBlocks(KeptStore(path, LAYOUT, FACTS))
            while True:
                key = key_of(numbers.randrange(KEYS))
                store.put(key, contents[key])
        finally:
            os._exit(1)
    return child


def read_beside(path: Path, seed: int, looks: int) -> tuple[int, list[str]]:
    """Blocks that a reader got while another process wrote, and those that were wrong."""
    KeptBlocks(KeptStore(path, LAYOUT, FACTS)).close()
    child = write_for_ever(path, seed)
    contents = {key_of(number): block_of(key_of(number)) for number in range(KEYS)}
    read, faults = 0, []
    kept = KeptReader(path, FACTS)
    try:
        while not kept.refresh():
            pass
        for _ in range(looks):
            kept.refresh()
            for key in kept.keys:
                data = kept.read(key)
                read += data is not None
                if data is not None and data != contents.get(key):
                    faults.append(key.hex())
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kept.close()
    return read, faults


@pytest.mark.parametrize("seed", range(3))
def test_reader_beside_a_writer_never_sees_a_wrong_block(seed: int, tmp_path: Path) -> None:
    read, faults = read_beside(tmp_path / "store", seed, 400)
    assert not faults
    assert read


def read_while_it_is_replaced(path: Path) -> bytes | None:
    """A block whose slot gets another one between the look at its entry and the copy."""
    writer = KeptBlocks(KeptStore(path, LAYOUT, FACTS))
    for number in range(8):
        writer.put(key_of(number), block_of(key_of(number)))
    kept = KeptReader(path, FACTS)
    entry = kept.find(key_of(0))
    writer.put(key_of(8), block_of(key_of(8)))  # into the slot of the longest unused
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "find", lambda key: entry)
        data = kept.read(key_of(0))
    kept.close()
    writer.close()
    return data


def test_block_that_is_replaced_while_it_is_read_is_none(tmp_path: Path) -> None:
    assert read_while_it_is_replaced(tmp_path / "store") is None


def test_block_that_is_replaced_while_it_is_read_is_wrong_without_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "is_right", lambda data, expected: True)
    assert read_while_it_is_replaced(tmp_path / "store") == block_of(key_of(8))


def test_reader_follows_the_writer(tmp_path: Path) -> None:
    path = tmp_path / "store"
    writer = KeptBlocks(KeptStore(path, LAYOUT, FACTS))
    kept = KeptReader(path, FACTS)
    assert len(kept) == 0
    for number in range(12):
        writer.put(key_of(number), block_of(key_of(number)))
        assert kept.refresh() >= 1
        assert set(kept.keys) == set(writer.keys)
    assert kept.read(key_of(11)) == block_of(key_of(11))
    writer.put(key_of(12), block_of(key_of(12)))
    assert kept.read(key_of(4)) is None, "its entry is another's by now"
    writer.store.detach()
    kept.refresh()
    assert kept.keys == []
    kept.close()
    writer.close()


def test_reader_of_a_store_that_was_dropped_keeps_what_it_mapped(tmp_path: Path) -> None:
    path = tmp_path / "store"
    writer = KeptBlocks(KeptStore(path, LAYOUT, FACTS))
    writer.put(key_of(1), block_of(key_of(1)))
    writer.close()
    kept = KeptReader(path, FACTS)
    other = KeptBlocks(KeptStore(path, LAYOUT, FACTS | {"dtype": "float16"}))
    other.put(key_of(1), block_of(key_of(2)))
    assert kept.read(key_of(1)) == block_of(key_of(1))
    other.close()
    kept.close()


def test_reader_of_other_facts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    KeptStore(path, LAYOUT, FACTS).close()
    with pytest.raises(ValueError, match="dtype was 'bfloat16' and is 'float16'"):
        KeptReader(path, FACTS | {"dtype": "float16"})


def test_file_that_somebody_cut_is_named(tmp_path: Path) -> None:
    path = tmp_path / "store"
    writer = KeptBlocks(KeptStore(path, LAYOUT, FACTS))
    writer.put(key_of(1), block_of(key_of(1)))
    reading = KeptReader(path, FACTS)
    assert reading.read(key_of(1)) == block_of(key_of(1))
    os.truncate(path, 4096)  # pages beyond are gone: whoever reads them is ended
    for look in (reading.refresh, lambda: reading.read(key_of(1))):
        with pytest.raises(ValueError, match="was cut to 4096 bytes"):
            look()
    os.truncate(path, LAYOUT.file_bytes)  # for the writer, which closes in order
    writer.close()
    reading.close()


def test_closed_reader_says_so(tmp_path: Path) -> None:
    path = tmp_path / "store"
    KeptStore(path, LAYOUT, FACTS).close()
    reading = KeptReader(path, FACTS)
    reading.close()
    reading.close()
    for look in (reading.refresh, lambda: reading.read(b"k"), lambda: reading.find(b"k")):
        with pytest.raises(ValueError, match="this reader is closed"):
            look()
