"""A store on a Device-DAX device: what is made, believed, left alone and refused."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.kept import (
    KeptBlocks,
    KeptLayout,
    KeptReader,
    KeptStore,
    drop_kept,
    find_device,
    find_kept_devices,
    is_device,
    kept_path,
    look_at,
    open_or_read,
    private_file,
    verify_kept,
)
from cxl_offload.kept.layout import FREE_MARK, HEADER_BYTES, STORE_MARK
from cxl_offload.memory import survive_memory_errors
from tests.kept.devices import PATH, bytes_of, device_file, fill_device, stand_in
from tests.kept.ground import FACTS, LAYOUT, block_of, key_of
from tests.memory.dax_devices import MIB, SIZE, write_device

OTHERS = b"somebody else's file system"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stand_in(monkeypatch, tmp_path)
    return tmp_path


def opened(facts: dict[str, str] = FACTS, layout: KeptLayout = LAYOUT) -> KeptBlocks:
    return KeptBlocks(KeptStore(PATH, layout, facts))


def fill(count: int = 5) -> list[bytes]:
    keys = [key_of(number) for number in range(count)]
    store = opened()
    for key in keys:
        store.put(key, block_of(key))
    store.close()
    return keys


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        ("/dev/dax0.0", True),
        ("/dev/dax12.34", True),
        ("/dev/dax0", False),
        ("dax0.0", False),
        ("/dev/shm/dax0.0", False),
        ("/dev/dax0.0/..", False),
        ("/dev/../dev/dax0.0", False),
    ],
)
def test_device_is_known_by_its_name(path: str, is_one: bool) -> None:
    assert is_device(path) is is_one


def test_blocks_are_there_for_the_next_one_who_opens(root: Path) -> None:
    keys = fill()
    assert bytes_of(root, 8) == STORE_MARK
    store = opened()
    assert {key: store.get(key) for key in store.keys} == {key: block_of(key) for key in keys}
    store.close()
    assert device_file(root).stat().st_size == SIZE


def test_blocks_of_other_facts_or_sizes_are_dropped_in_their_place(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill()
    with caplog.at_level(logging.WARNING):
        store = opened(FACTS | {"dtype": "float16"})
        assert len(store) == 0
        store.put(key_of(9), block_of(key_of(9)))
        store.close()
    assert "dtype was 'bfloat16' and is 'float16'" in caplog.text
    assert len(opened(FACTS | {"dtype": "float16"})) == 1
    store = opened(layout=KeptLayout(1536, 9))
    assert len(store) == 0
    store.close()


@pytest.mark.parametrize("at", [0, 100, LAYOUT.data_at, LAYOUT.file_bytes - len(OTHERS)])
def test_what_somebody_else_wrote_is_refused_and_stays(root: Path, at: int) -> None:
    fill_device(root, OTHERS, at)
    before = bytes_of(root)
    with pytest.raises(FileExistsError, match=r"holds something that is no store.*--force"):
        opened()
    with pytest.raises(ValueError, match="no store"):
        KeptReader(PATH, FACTS)
    if at < HEADER_BYTES:
        with pytest.raises(FileExistsError, match="--force"):
            drop_kept(PATH)
    else:
        assert drop_kept(PATH) == 0, "there is nothing to drop"
    assert bytes_of(root) == before
    drop_kept(PATH, force=True)
    assert len(opened()) == 0


def test_bytes_behind_the_store_are_not_touched(root: Path) -> None:
    fill_device(root, OTHERS, LAYOUT.file_bytes)
    fill()
    drop_kept(PATH)
    assert bytes_of(root)[LAYOUT.file_bytes :].startswith(OTHERS)


def test_dropped_store_is_gone_and_its_place_is_free(root: Path) -> None:
    keys = fill()
    reading = KeptReader(PATH, FACTS)
    assert drop_kept(PATH) == LAYOUT.file_bytes
    assert bytes_of(root, HEADER_BYTES) == FREE_MARK.ljust(HEADER_BYTES, b"\0")
    assert [reading.read(key) for key in keys] == [None] * 5
    reading.refresh()
    assert reading.keys == []
    reading.close()
    assert drop_kept(PATH) == 0
    store = opened()
    assert len(store) == 0, "though index and blocks are as they were"
    store.close()


def test_entries_of_a_store_that_was_there_are_not_left(root: Path) -> None:
    fill(8)
    opened(FACTS | {"model": "other"}).close()
    assert verify_kept(PATH).unreadable == ()
    assert look_at(PATH).blocks == 0


def test_reader_of_a_store_whose_place_another_takes_finds_nothing(root: Path) -> None:
    keys = fill()
    reading = KeptReader(PATH, FACTS)
    other = opened(FACTS | {"model": "other"})
    for number in range(LAYOUT.slots):
        other.put(key_of(number), bytes(LAYOUT.block_bytes))
    assert [reading.read(key) for key in keys] == [None] * 5
    reading.refresh()
    assert reading.keys == []
    other.close()
    reading.close()


def test_second_one_reads_what_the_first_writes_and_a_third_after_it_writes(root: Path) -> None:
    first, second = open_or_read(PATH, LAYOUT, FACTS), open_or_read(PATH, LAYOUT, FACTS)
    assert isinstance(first, KeptStore)
    assert isinstance(second, KeptReader)
    books = KeptBlocks(first)
    books.put(key_of(1), block_of(key_of(1)))
    second.refresh()
    assert second.read(key_of(1)) == block_of(key_of(1))
    with pytest.raises(BlockingIOError, match="stop that one first"):
        drop_kept(PATH)
    books.close()
    third = open_or_read(PATH, LAYOUT, FACTS)
    assert isinstance(third, KeptStore)
    third.close()
    second.close()


def test_device_is_a_pool_or_a_store(root: Path) -> None:
    """As a session claims it, with an exclusive lock of the whole file."""
    with device_file(root).open("r+b") as pool:
        fcntl.flock(pool, fcntl.LOCK_EX)
        for call in (opened, lambda: KeptReader(PATH, FACTS), lambda: drop_kept(PATH)):
            with pytest.raises(OSError, match="a pool or a store") as caught:
                call()
            assert caught.value.errno == errno.EBUSY
        assert "a pool or a store" in look_at(PATH).problem
        assert find_kept_devices() == ()
    store = opened()
    with device_file(root).open("r+b") as pool, pytest.raises(BlockingIOError):
        fcntl.flock(pool, fcntl.LOCK_EX | fcntl.LOCK_NB)
    store.close()


def test_device_of_another_user_or_open_to_others_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill()
    before = bytes_of(root)
    device_file(root).chmod(0o660)
    with pytest.raises(PermissionError, match=r"others may open it \(mode 660\)"):
        opened()
    device_file(root).chmod(0o600)
    monkeypatch.setattr(private_file.os, "geteuid", lambda: os.getuid() + 1)
    for call in (opened, lambda: KeptReader(PATH, FACTS), lambda: drop_kept(PATH, force=True)):
        with pytest.raises(PermissionError, match=f"belongs to user {os.getuid()}"):
            call()
    assert find_kept_devices() == ()
    assert bytes_of(root) == before


def test_device_that_cannot_be_mapped_says_how_it_can(root: Path) -> None:
    write_device(root, "dax1.0", driver="kmem")
    write_device(root, "dax2.0", driver=None)
    for name, said in {
        "dax1.0": "system-ram, so its memory is node 3; take it off: sudo daxctl",
        "dax2.0": "not in mode devdax",
        "dax7.0": "no such Device-DAX device; there are: dax0.0, dax1.0, dax2.0",
    }.items():
        with pytest.raises(OSError, match=said) as caught:
            KeptStore(f"/dev/{name}", LAYOUT, FACTS)
        assert caught.value.errno == errno.ENODEV
        assert said.split(";")[0] in look_at(Path(f"/dev/{name}")).problem
    device_file(root).unlink()
    with pytest.raises(OSError, match="in a container add --device"):
        opened()


def test_store_that_the_device_has_no_room_for_is_one_line(root: Path) -> None:
    with pytest.raises(MemoryError, match=r"/dev/dax0.0: it has 64 MiB left; ask for less"):
        opened(layout=KeptLayout(MIB, 64))
    assert bytes_of(root) == bytes(SIZE)
    opened(layout=KeptLayout(MIB, 63)).close()


def test_device_that_became_smaller_has_no_store(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened(layout=KeptLayout(MIB, 40)).close()
    (root / "sys/bus/dax/devices/dax0.0/size").write_text(f"{20 * MIB}\n")
    assert "it was cut or grew" in look_at(PATH).problem
    store = opened(layout=KeptLayout(MIB, 10))
    store.close()
    assert "it was cut or grew" in caplog.text


def test_pages_of_a_device_are_not_placed(root: Path) -> None:
    with pytest.raises(ValueError, match="cannot be placed"):
        KeptStore(PATH, LAYOUT, FACTS, prepare=lambda mapping, is_new: None)
    opened().close()


@pytest.mark.parametrize(("at", "nbytes"), [(-1, 8), (0, 3 * MIB), (2 * MIB, 1), (8, -16)])
def test_bytes_outside_of_a_mapping_are_not_written_back(root: Path, at: int, nbytes: int) -> None:
    store = opened()
    with pytest.raises(ValueError, match="write back bytes"):
        store.store.mapping.write_back(at, nbytes)
    store.close()


def test_sizes_are_those_of_the_kernel(root: Path) -> None:
    device = find_device(PATH)
    assert (device.nbytes, device.align_bytes) == (SIZE, 2 * MIB)
    assert [device.rounded(count) for count in (1, 2 * MIB, 2 * MIB + 1)] == [
        2 * MIB,
        2 * MIB,
        4 * MIB,
    ]


def test_verifying_names_damaged_blocks_and_unreadable_entries(root: Path) -> None:
    fill()
    raw = bytes_of(root, LAYOUT.file_bytes)
    at = raw.index(block_of(key_of(3)))
    fill_device(root, bytes([raw[at] ^ 1]), at)
    fill_device(root, b"half", LAYOUT.entry_at(LAYOUT.slots - 1) + 20)
    found = verify_kept(PATH)
    slot = (at - LAYOUT.data_at) // LAYOUT.block_bytes
    assert (found.right, dict(found.damaged)) == (3, {slot: key_of(3).hex()})
    assert found.unreadable == (LAYOUT.slots - 1,)


def test_commands_show_verify_and_drop_it(root: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["kv", *arguments])
        return f"{done.exit_code} {done.output}"

    assert "/dev/dax0.0" not in run("list"), "nothing is on it"
    fill()
    assert "/dev/dax0.0" in run("list")
    assert "tiny bfloat16" in run("list")
    assert "/dev/dax0.0" not in run("list", "--folder", str(tmp_path))
    assert run("verify", str(PATH)) == "0 /dev/dax0.0: 5 right, 0 damaged\n"
    assert run("drop", str(PATH)) == "0 /dev/dax0.0: dropped, 192 KiB free\n"
    fill_device(root, OTHERS)
    assert "no store" in run("verify", str(PATH))
    refused = run("drop", str(PATH))
    assert refused.startswith("2 ")
    assert "--force" in refused
    assert run("drop", str(PATH), "--force").startswith("0 ")


def test_name_of_a_device_takes_no_folder() -> None:
    assert kept_path("/dev/dax0.0") == PATH
    with pytest.raises(ValueError, match="lies in no folder"):
        kept_path("/dev/dax0.0", "/dev/shm")
    with pytest.raises(ValueError, match="or a device, such as"):
        kept_path("/dev/dax0")


def test_store_whose_device_leaves_finds_and_keeps_nothing_and_says_so_once(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a file that is cut: reading what is not there is SIGBUS in both."""
    keys = fill()
    store = opened()
    reading = KeptReader(PATH, FACTS)
    with survive_memory_errors(interrupt=False):
        os.truncate(device_file(root), 0)
        with caplog.at_level(logging.WARNING):
            assert [store.get(key) for key in keys] == [None] * 5
            store.put(keys[0], block_of(keys[0]))
            assert (len(store), store.slots_left) == (0, 0)
            assert store.find(keys[0]) is None
        assert [reading.read(key) for key in keys] == [None] * 5
        store.close()
        reading.close()
    assert [record.message.partition(":")[0] for record in caplog.records] == [f"{PATH} is gone"]
    os.truncate(device_file(root), SIZE)
    opened().close()
