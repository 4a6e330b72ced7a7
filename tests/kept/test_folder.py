"""What is in a folder of stores, whether it is right, and its end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.kept import (
    KeptBlocks,
    KeptStore,
    drop_kept,
    find_kept,
    kept_path,
    verify_kept,
)
from tests.kept.ground import FACTS, LAYOUT, block_of, key_of

runner = CliRunner()


def make(folder: Path, name: str, blocks: int) -> Path:
    path = kept_path(name, folder)
    store = KeptBlocks(KeptStore(path, LAYOUT, FACTS))
    for number in range(blocks):
        store.put(key_of(number), block_of(key_of(number)))
    store.close()
    return path


def test_every_store_is_found_with_what_it_holds(tmp_path: Path) -> None:
    make(tmp_path, "one", 3)
    writer = KeptStore(make(tmp_path, "two", 1), LAYOUT, FACTS)
    kept_path("bad", tmp_path).touch(mode=0o600)
    os.mkfifo(kept_path("fifo", tmp_path))
    (tmp_path / "cxl_offload_kv_x.mmap").touch()
    found = {each.name: each for each in find_kept(tmp_path)}
    assert list(found) == ["bad", "fifo", "one", "two"]
    assert found["one"].facts == FACTS
    assert (found["one"].blocks, found["one"].slots, found["one"].block_bytes) == (3, 8, 1536)
    assert found["one"].held_bytes >= LAYOUT.file_bytes
    assert (found["one"].in_use, found["two"].in_use) == (False, True)
    assert "no store" in found["bad"].problem
    assert found["fifo"].problem
    writer.close()


def test_verifying_names_damaged_blocks_and_changes_nothing(tmp_path: Path) -> None:
    path = make(tmp_path, "one", 5)
    assert (verify_kept(path).right, dict(verify_kept(path).damaged)) == (5, {})
    raw = bytearray(path.read_bytes())
    at = raw.index(block_of(key_of(3)))
    raw[at + 5] ^= 8
    path.write_bytes(raw)
    found = verify_kept(path)
    slot = (at - LAYOUT.data_at) // LAYOUT.block_bytes
    assert (found.right, dict(found.damaged)) == (4, {slot: key_of(3).hex()})
    assert path.read_bytes() == bytes(raw)


def test_verifying_tells_the_slot_that_it_is_at(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    verify_kept(make(tmp_path, "one", 3), progress=lambda slot, slots: told.append((slot, slots)))
    last = LAYOUT.slots - 1  # blocks take slots from the last
    assert told == [(slot, LAYOUT.slots) for slot in (last - 2, last - 1, last)]


def test_verifying_names_entries_that_cannot_be_read(tmp_path: Path) -> None:
    path = make(tmp_path, "one", 5)
    raw = bytearray(path.read_bytes())
    raw[LAYOUT.entry_at(LAYOUT.slots - 1) + 20] ^= 1  # blocks take slots from the last
    path.write_bytes(raw)
    found = verify_kept(path)
    assert (found.right, dict(found.damaged), found.unreadable) == (4, {}, (LAYOUT.slots - 1,))
    said = runner.invoke(app, ["kv", "verify", "--folder", str(tmp_path)])
    assert said.exit_code == 1
    assert "4 right, 1 damaged" in said.output
    assert f"slot {LAYOUT.slots - 1}: its entry is damaged or was not finished" in said.output


def test_entry_that_is_being_written_is_not_called_damaged(tmp_path: Path) -> None:
    path = make(tmp_path, "one", 1)
    writer = KeptStore(path, LAYOUT, FACTS)
    with path.open("r+b") as file:
        file.seek(LAYOUT.entry_at(0) + 20)
        file.write(b"half")
    assert verify_kept(path).unreadable == ()
    writer.close()
    assert verify_kept(path).unreadable == (0,)


def test_link_is_named_as_one(tmp_path: Path) -> None:
    kept_path("link", tmp_path).symlink_to(make(tmp_path, "one", 1))
    assert {each.name: each.problem for each in find_kept(tmp_path)} == {
        "link": "it is a symbolic link",
        "one": "",
    }


def test_file_with_another_name_frees_nothing(tmp_path: Path) -> None:
    path = make(tmp_path, "one", 1)
    os.link(path, tmp_path / "other")
    assert drop_kept(path) == 0


def test_store_in_use_is_not_dropped(tmp_path: Path) -> None:
    path = make(tmp_path, "one", 1)
    writer = KeptStore(path, LAYOUT, FACTS)
    with pytest.raises(BlockingIOError, match="stop that one first"):
        drop_kept(path)
    writer.close()
    assert drop_kept(path) >= LAYOUT.file_bytes
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        drop_kept(path)


def test_what_only_has_the_name_of_a_store_can_be_dropped(tmp_path: Path) -> None:
    os.mkfifo(kept_path("fifo", tmp_path))
    target = make(tmp_path, "one", 1)
    kept_path("link", tmp_path).symlink_to(target)
    for name in ("fifo", "link"):
        drop_kept(kept_path(name, tmp_path))
    assert [each.name for each in find_kept(tmp_path)] == ["one"]


@pytest.mark.parametrize("name", ["", "a/b", "..\n", "x" * 300])
def test_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="of kept blocks"):
        kept_path(name)


def test_name_that_writes_to_a_terminal_is_shown_escaped(tmp_path: Path) -> None:
    (tmp_path / "cxl_offload_kept_a\nb\x1b[31mred.kv").write_bytes(b"")
    (found,) = find_kept(tmp_path)
    assert found.name == r"a\nb\x1b[31mred"
    assert found.path.exists()
