"""Writers that are killed at seeded points: what is found afterwards is right, and all there."""

from __future__ import annotations

from pathlib import Path

import pytest

from cxl_offload.kept import KeptBlocks, KeptStore, blocks, layout
from tests.kept.ground import (
    FACTS,
    LAYOUT,
    TooEarly,
    after,
    keys_of,
    live_and_die,
    wrong_blocks,
)

LIVES = 20


def reopened(path: Path) -> KeptBlocks:
    return KeptBlocks(KeptStore(path, LAYOUT, FACTS))


def faults_of_a_death(path: Path, seed: int, there: list[bytes]) -> list[str]:
    """What is wrong with a store after one more life, that began with these keys."""
    done = live_and_die(path, seed, KeptBlocks)
    written = keys_of(seed)
    store = reopened(path)
    try:
        found, before = set(store.keys), set(after(there, written[:done], LAYOUT.slots))
        now = set(after(there, written[: done + 1], LAYOUT.slots))
        faults = [f"seed {seed}: wrong block {key}" for key in wrong_blocks(store)]
        faults += [f"seed {seed}: damaged"] * store.damaged
        # What was finished is kept, except for what the write under way had put away.
        under_way = set(written[done : done + 1])
        faults += [f"seed {seed}: lost {key.hex()}" for key in (before & now) - under_way - found]
        faults += [f"seed {seed}: {key.hex()} came back" for key in found - before - now]
        return faults
    finally:
        store.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first_seed", range(0, 200, LIVES))
def test_killed_writer_leaves_right_blocks_and_all_that_it_finished(
    first_seed: int, tmp_path: Path
) -> None:
    path = tmp_path / "store"
    faults: list[str] = []
    for seed in range(first_seed, first_seed + LIVES):
        store = reopened(path)
        there = store.keys
        store.close()
        faults += faults_of_a_death(path, seed, there)
    assert not faults


@pytest.mark.slow(reason="a control, of many killed writers")
def test_killed_writer_leaves_wrong_blocks_where_the_protection_is_taken_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (blocks, layout):
        monkeypatch.setattr(module, "is_right", lambda data, expected: True)
    faults = []
    for seed in range(40):
        path = tmp_path / str(seed)
        live_and_die(path, seed, TooEarly)
        store = reopened(path)
        faults += wrong_blocks(store)
        store.close()
    assert len(faults) >= 10


@pytest.mark.slow(reason="a control, of many killed writers")
def test_checksums_alone_keep_wrong_blocks_from_being_found_where_the_order_is_lost(
    tmp_path: Path,
) -> None:
    damaged = 0
    for seed in range(40):
        path = tmp_path / str(seed)
        live_and_die(path, seed, TooEarly)
        store = reopened(path)
        assert not wrong_blocks(store)
        damaged += store.damaged
        store.close()
    assert damaged >= 10, "blocks are lost without the order"
