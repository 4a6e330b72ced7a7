"""Kills and power cuts over a store on a Device-DAX device, with what it promises there.

Of the medium, which is simulated, every word has any content that it has had since it was last
written back. What a write-back covered is there: nothing that a store has finished is lost.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from cxl_offload.kept import KeptBlocks, KeptLayout, KeptStore, blocks, layout
from cxl_offload.kept.layout import FREE_MARK
from cxl_offload.kept.place import DevicePlace
from tests.kept.devices import PATH, bytes_of, fill_device, stand_in
from tests.kept.ground import FACTS, LAYOUT, after, block_of, keys_of, wrong_blocks
from tests.kept.test_kills import faults_of_a_death, reopened
from tests.kept.test_readers import read_beside

UNITS = {"words": 8, "lines": 64}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    stand_in(monkeypatch, tmp_path)
    return tmp_path


class Medium:
    """What may be on a medium, unit by unit, after writes and write-backs."""

    def __init__(self, made: bytes, unit: int) -> None:
        self._unit = unit
        self._caches = bytearray(made)
        self._sure = bytearray(made)
        self._open: dict[int, list[bytes]] = {}

    def _units(self, at: int, nbytes: int) -> range:
        return range(at // self._unit * self._unit, at + nbytes, self._unit)

    def write(self, at: int, data: bytes) -> None:
        self._caches[at : at + len(data)] = data
        for first in self._units(at, len(data)):
            known = self._open.setdefault(first, [bytes(self._sure[first : first + self._unit])])
            known.append(bytes(self._caches[first : first + self._unit]))

    def write_back(self, at: int, nbytes: int) -> None:
        for first in self._units(at, nbytes):
            if self._open.pop(first, None) is not None:
                self._sure[first : first + self._unit] = self._caches[first : first + self._unit]

    def image(self, numbers: random.Random) -> bytes:
        medium = bytearray(self._sure)
        for first, known in self._open.items():
            medium[first : first + self._unit] = numbers.choice(known)
        return bytes(medium)


class Recorder:
    """What a store does to its device, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, protected: bool = True) -> None:
        self.steps: list[tuple[str, int, Any]] = []
        steps, write = self.steps, KeptStore._write

        def written(store: KeptStore, at: int, data: bytes | memoryview) -> None:
            steps.append(("write", at, bytes(data)))
            write(store, at, data)

        def written_back(place: DevicePlace, mapping: object, at: int, nbytes: int) -> None:
            if protected:
                steps.append(("write_back", at, nbytes))

        monkeypatch.setattr(KeptStore, "_write", written)
        monkeypatch.setattr(DevicePlace, "write_back", written_back)

    def finished(self, key: bytes) -> None:
        self.steps.append(("finished", 0, key))


def cut(
    made: bytes, steps: list[tuple[str, int, Any]], unit: int, numbers: random.Random
) -> tuple[bytes, list[bytes]]:
    """What is there when the power goes at a seeded step, and what was finished by then."""
    medium, finished = Medium(made, unit), list[bytes]()
    last = numbers.randrange(1, len(steps) + 1)
    for number, (what, at, given) in enumerate(steps[:last]):
        if what == "finished":
            finished.append(given)
        elif what == "write_back":
            medium.write_back(at, given)
        else:
            end = numbers.randrange(len(given) // 8 + 1) * 8 if number == last - 1 else len(given)
            medium.write(at, given[:end])
    return medium.image(numbers), finished


def recorded(
    root: Path, monkeypatch: pytest.MonkeyPatch, seed: int, *, protected: bool = True
) -> tuple[bytes, list[tuple[str, int, Any]]]:
    KeptStore(PATH, LAYOUT, FACTS).close()
    made = bytes_of(root, LAYOUT.file_bytes)
    with monkeypatch.context() as patched:
        recorder = Recorder(patched, protected=protected)
        store = KeptBlocks(KeptStore(PATH, LAYOUT, FACTS))
        for key in keys_of(seed):
            store.put(key, block_of(key))
            recorder.finished(key)
        store.close()
    return made, recorder.steps


def lost_after(root: Path, image: bytes, seed: int, finished: list[bytes]) -> list[bytes]:
    """What was finished and is not found; asserts that nothing wrong is."""
    fill_device(root, image)
    store = KeptBlocks(KeptStore(PATH, LAYOUT, FACTS))
    try:
        assert not wrong_blocks(store)
        there = {key for key in store.keys if store.get(key) is not None}
        # The step under way has put one block away, and its own key.
        written = keys_of(seed)
        under_way = written[len(finished) : len(finished) + 1]
        still = set(after([], [*finished, *under_way], LAYOUT.slots)) - set(under_way)
        return [key for key in still & set(finished) if key not in there]
    finally:
        store.close()


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("seed", range(5))
def test_power_cut_keeps_all_that_was_finished(
    seed: int, unit: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, steps = recorded(root, monkeypatch, seed)
    for number in range(20):
        numbers = random.Random(f"device {seed} {unit} {number}")
        image, finished = cut(made, steps, UNITS[unit], numbers)
        assert not lost_after(root, image, seed, finished), f"cut {number}"


def test_power_cut_loses_blocks_where_nothing_is_written_back(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, steps = recorded(root, monkeypatch, 0, protected=False)
    lost = 0
    for number in range(20):
        numbers = random.Random(f"device 0 lines {number}")
        image, finished = cut(made, steps, UNITS["lines"], numbers)
        lost += len(lost_after(root, image, 0, finished))
    assert lost > 20


def test_power_cut_leaves_wrong_blocks_where_all_protection_is_taken_out(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, steps = recorded(root, monkeypatch, 0, protected=False)
    for module in (blocks, layout):
        monkeypatch.setattr(module, "is_right", lambda data, expected: True)
    faults = []
    for number in range(20):
        image, _ = cut(made, steps, 64, random.Random(f"device 0 lines {number}"))
        fill_device(root, image)
        store = KeptBlocks(KeptStore(PATH, LAYOUT, FACTS))
        faults += wrong_blocks(store)
        store.close()
    assert faults


@pytest.mark.parametrize("before", ["zeros", "dropped", "another store"])
def test_power_cut_while_a_store_is_made_leaves_a_place_for_one(
    before: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that was not finished is taken for a store, or for somebody else's data."""
    many = KeptLayout(block_bytes=64, slots=600)
    if before != "zeros":
        fill_device(root, random.Random(1).randbytes(many.file_bytes), 64)
        fill_device(root, FREE_MARK)
        if before == "another store":
            other = KeptBlocks(KeptStore(PATH, LAYOUT, {"model": "other"}))
            other.put(b"key", bytes(LAYOUT.block_bytes))
            other.close()
    made = bytes_of(root, many.file_bytes)
    with monkeypatch.context() as patched:
        recorder = Recorder(patched)
        KeptStore(PATH, many, FACTS).close()
    ends = set()
    for number in range(25):
        numbers = random.Random(f"made {before} {number}")
        image, _ = cut(made, recorder.steps, 8, numbers)
        fill_device(root, image)
        ends.add(image[:8])
        store = KeptStore(PATH, many, FACTS)
        assert store.entries == ()
        store.close()
    assert len(ends) > 1


@pytest.mark.parametrize("first_seed", [0, 20])
def test_killed_writer_leaves_right_blocks_and_all_that_it_finished(
    first_seed: int, root: Path
) -> None:
    faults: list[str] = []
    for seed in range(first_seed, first_seed + 20):
        store = reopened(PATH)
        there = store.keys
        store.close()
        faults += faults_of_a_death(PATH, seed, there)
    assert not faults


def test_reader_beside_a_writer_never_sees_a_wrong_block(root: Path) -> None:
    read, faults = read_beside(PATH, 1, 200)
    assert not faults
    assert read
