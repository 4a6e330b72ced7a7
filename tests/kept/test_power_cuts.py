"""The power goes: of what was written, any part may have reached the medium, in any order.

A store is written while every change is recorded. At a seeded moment each unit of the medium (a
word of persistent memory, a sector, a page) has any one of the contents that it has had since the
file was made, chosen apart from the others. The last change may be cut anywhere.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cxl_offload.kept import KeptBlocks, KeptStore, blocks, layout
from tests.kept.ground import FACTS, LAYOUT, block_of, keys_of, wrong_blocks

UNITS = {"words": 8, "sectors": 512, "pages": 4096}


class RecordedStore(KeptStore):
    """Remembers every change of the file."""

    def _write(self, at: int, data: bytes | memoryview) -> None:
        self.__dict__.setdefault("changes", []).append((at, bytes(data)))
        super()._write(at, data)


def recorded(path: Path, seed: int) -> tuple[bytes, list[tuple[int, bytes]]]:
    """The file as it was made, and all changes since."""
    RecordedStore(path, LAYOUT, FACTS).close()
    made = path.read_bytes()
    store = KeptBlocks(RecordedStore(path, LAYOUT, FACTS))
    for key in keys_of(seed):
        store.put(key, block_of(key))
    changes = store.store.__dict__["changes"]
    store.close()
    return made, changes


def cut(made: bytes, changes: list[tuple[int, bytes]], unit: int, numbers: random.Random) -> bytes:
    """What the medium holds when the power goes in the middle of the changes."""
    medium = bytearray(made)
    last = numbers.randrange(1, len(changes) + 1)
    histories: dict[int, list[bytes]] = {}
    volatile = bytearray(made)
    for number, (at, data) in enumerate(changes[:last]):
        if number == last - 1:
            data = data[: numbers.randrange(len(data) + 1)]
        volatile[at : at + len(data)] = data
        for first in range(at // unit * unit, at + len(data), unit):
            history = histories.setdefault(first, [made[first : first + unit]])
            history.append(bytes(volatile[first : first + unit]))
    behind = numbers.choice((0.001, 0.01, 0.1, 0.5))  # of a medium: how much is not the newest
    for first, history in histories.items():
        is_behind = numbers.random() < behind
        version = numbers.randrange(len(history)) if is_behind else len(history) - 1
        medium[first : first + unit] = history[version]
    return bytes(medium)


def after_cut(path: Path, image: bytes) -> tuple[list[str], int]:
    """Wrong blocks, and how many were right."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(image)
    store = KeptBlocks(KeptStore(path, LAYOUT, FACTS))
    faults = wrong_blocks(store)
    right = len(store)
    store.close()
    return faults, right


@pytest.mark.sampled(11)
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("seed", range(10))
def test_power_cut_leaves_no_wrong_block(seed: int, unit: str, tmp_path: Path) -> None:
    made, changes = recorded(tmp_path / "store", seed)
    right = 0
    for number in range(20):
        numbers = random.Random(f"cut {seed} {unit} {number}")
        faults, found = after_cut(tmp_path / "after", cut(made, changes, UNITS[unit], numbers))
        assert not faults, f"cut {number}"
        right += found
    assert right, "some blocks survive"


@pytest.mark.parametrize("unit", UNITS)
def test_power_cut_leaves_wrong_blocks_where_checksums_are_taken_out(
    unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (blocks, layout):
        monkeypatch.setattr(module, "is_right", lambda data, expected: True)
    made, changes = recorded(tmp_path / "store", 0)
    faults = []
    for number in range(60):
        numbers = random.Random(f"cut 0 {unit} {number}")
        faults += after_cut(tmp_path / "after", cut(made, changes, UNITS[unit], numbers))[0]
    assert faults


def test_power_cut_while_the_file_is_made_leaves_no_store(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = RecordedStore(path, LAYOUT, FACTS)
    ((at, header),) = store.__dict__["changes"]
    store.close()
    for written in range(len(header)):
        image = bytes(at) + header[:written] + bytes(LAYOUT.file_bytes - at - written)
        path.write_bytes(image)
        with pytest.raises(ValueError, match=r"no store|damaged|format"):
            layout.KeptHeader.unpack(path.read_bytes()[: layout.HEADER_BYTES], len(image))
