"""The power of a guest is cut: what its stores hold afterwards, on persistent memory.

Each guest looks at what the one before it left, says what it found, and writes on until it is
killed (QEMU, by SIGKILL) after a seeded number of blocks. A real kernel and a real ext4 decide what
was on the medium: with DAX all that was written, without it what was written back, and on a
Device-DAX device all that was written. QEMU has no caches that a power cut could empty.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.kept.ground import LAYOUT, after, key_of
from tests.vm.harness.machine import load
from tests.vm.harness.packages import Assets, find
from tests.vm.harness.power import make_medium, run_until
from tests.vm.test_guests import REQUIRED, TIMEOUT_S, WANTED

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(6 * TIMEOUT_S),
    pytest.mark.skipif(not WANTED, reason="boots virtual machines for minutes: make test-vm"),
]

MACHINE = "two-sockets-memory-node"
NAMES = ("dax", "pages", "device")
Said = list[str]


@pytest.fixture
def boot(tmp_path: Path) -> Callable[..., Said]:
    """A guest that goes on with these media, until ``cut`` says so."""
    assets = find()
    if not isinstance(assets, Assets):
        (pytest.fail if REQUIRED else pytest.skip)(assets)

    def booted(media: Sequence[Path], cut: Callable[[str], bool], *options: str) -> Said:
        command = [sys.executable, "-m", "tests.vm.guest_power", *options]
        return run_until(cut, load(MACHINE), assets, media, command, timeout_s=TIMEOUT_S)

    return booted


@pytest.fixture
def media(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"{name}.img" for name in NAMES]
    for path in made:
        make_medium(path)
    return made


def number_of(said: Said, *begin: str) -> int:
    """What follows these words."""
    (line,) = (line for line in said if line.split()[: len(begin)] == list(begin))
    return int(line.split()[-1])


def keys_found(said: Said, name: str) -> list[bytes]:
    (line,) = (line for line in said if line.startswith(f"found {name}"))
    return [key_of(int(word)) for word in line.split()[2:]]


def blocks_written(count: int) -> Callable[[str], bool]:
    """The power goes after so many blocks."""
    left = count

    def cut(said: str) -> bool:
        nonlocal left
        left -= said.startswith("written")
        return left == 0

    return cut


def what_must_be_there(said: Said, name: str, *, all_writes: bool) -> set[bytes]:
    """By what a guest said before its power went.

    What was flushed and not touched since, or, where every write is on the medium, what was
    written. A guest may have done one step more than it had said.
    """
    there = keys_found(said, name)
    # Opening a store takes out what it does not believe, and looking at blocks makes none younger.
    safe: list[bytes] = there if all_writes else []
    since: list[bytes] = []
    for line in said:
        is_written = line.startswith(f"written {name} ")
        if is_written:
            since.append(key_of(int(line.split()[-1])))
            there = after(there, since[-1:], LAYOUT.slots)
        if line == f"flushed {name}" or (is_written and all_writes):
            safe, since = there, []
    still = set(after(safe, since, LAYOUT.slots)) & set(safe)
    # The step after the last one takes the slot of the longest unused block, or of its own key.
    return still - set(since)


@pytest.mark.parametrize("seed", [19])
def test_power_cuts_leave_right_blocks_and_all_that_was_flushed(
    seed: int, media: list[Path], boot: Callable[..., Said]
) -> None:
    numbers = random.Random(f"cuts {seed}")
    before: Said | None = None
    found = 0
    for life in range(3):
        said = boot(media, blocks_written(numbers.randrange(30, 140)), "--seed", str(seed + life))
        for name in NAMES:
            assert number_of(said, "wrong", name) == 0
            there = keys_found(said, name)
            if before is not None:
                must = what_must_be_there(before, name, all_writes=name != "pages")
                # One more block may have been under way: it takes at most two of them.
                assert len(must - set(there)) <= 1, f"life {life}, {name}"
                found += len(there)
        assert "dax=always" in next(line for line in said if line.startswith("mounted dax"))
        before = said
    assert found


def test_power_cut_loses_blocks_or_leaves_wrong_ones_where_the_protection_is_taken_out(
    media: list[Path], boot: Callable[..., Said], tmp_path: Path
) -> None:
    """The index reaches the medium and the blocks do not; with DAX, without MAP_SYNC."""
    before = boot(media, blocks_written(60), "--seed", "1", "--unordered")
    copies = [Path(shutil.copy(path, tmp_path / f"copy-{path.name}")) for path in media]
    protected = boot(media, lambda said: said == "opened", "--seed", "2")
    assert number_of(protected, "wrong", "pages") == 0
    assert number_of(protected, "damaged", "pages") > 0
    must = what_must_be_there(before, "dax", all_writes=True)
    assert len(must - set(keys_found(protected, "dax"))) > 1
    taken_out = boot(copies, lambda said: said == "opened", "--seed", "2", "--unprotected")
    assert number_of(taken_out, "wrong", "pages") > 0
