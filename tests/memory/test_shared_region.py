"""Memory of several processes: placed once, shared by all, gone with the last."""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading
import time
from pathlib import Path
from uuid import uuid4

import pytest

from cxl_offload.memory import (
    Bind,
    Session,
    SharedRegion,
    Weighted,
    current_session,
    remove_leftovers,
    shared_region,
)
from cxl_offload.memory.shared import SHARED_ROOT
from cxl_offload.topology import load_machine

MIB = 1 << 20
NODE = current_session().kernel.allowed_nodes[0]

# Maps a region of argv[2] bytes for argv[3] processes, writes its mark, and waits.
MAPPER = """
import sys
from cxl_offload.memory import SharedRegion
name, nbytes, mappers, mark = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
region = SharedRegion(name, nbytes, "bind:%s", mappers=mappers)
region.mapping[: len(mark)] = mark.encode()
print(region.placement().granted, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def name() -> str:
    return f"test-{uuid4().hex}"


def path_of(name: str) -> Path:
    return SHARED_ROOT / f"cxl_offload_kv_{name}.mmap"


def start_mapper(name: str, nbytes: int, mappers: int, mark: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MAPPER % NODE, name, str(nbytes), str(mappers), mark]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_pages_are_on_the_nodes_of_the_policy_before_anybody_writes(name: str) -> None:
    region = SharedRegion(name, 8 * MIB, Bind((NODE,)))
    assert region.placement().granted == {NODE: 8 * MIB}
    assert region.notes == ()
    region.close()


def test_slots_of_one_rank_are_placed_and_the_rest_is_not(name: str) -> None:
    region = SharedRegion(name, 16 * mmap.PAGESIZE)
    region.place(
        Bind((NODE,)),
        offset=mmap.PAGESIZE,
        part_bytes=mmap.PAGESIZE,
        stride_bytes=4 * mmap.PAGESIZE,
        count=4,
    )
    held = [
        current_session().bytes_per_node(region.address + page * mmap.PAGESIZE, mmap.PAGESIZE)
        for page in range(16)
    ]
    assert [NODE in each for each in held] == [page % 4 == 1 for page in range(16)]
    region.close()


def test_slots_without_gaps_are_placed_as_one_range(name: str) -> None:
    region = SharedRegion(name, 16 * mmap.PAGESIZE)
    page = mmap.PAGESIZE
    region.place(Bind((NODE,)), offset=page, part_bytes=3 * page, stride_bytes=3 * page, count=4)
    first = current_session().bytes_per_node(region.address, page)
    placed = current_session().bytes_per_node(region.address + page, 12 * page)
    rest = current_session().bytes_per_node(region.address + 13 * page, 3 * page)
    assert (first, placed, rest) == ({-1: page}, {NODE: 12 * page}, {-1: 3 * page})
    region.close()


def test_processes_see_the_same_bytes_and_the_name_goes_with_the_last_to_map(name: str) -> None:
    region = SharedRegion(name, 2 * MIB, Bind((NODE,)), mappers=2)
    assert path_of(name).exists()
    region.mapping[MIB : MIB + 3] = b"own"
    other = start_mapper(name, 2 * MIB, 2, "other")
    assert other.stdout is not None
    assert other.stdout.readline().strip() == str({NODE: 2 * MIB})
    assert not path_of(name).exists(), "both have mapped it"
    assert region.mapping[:5] == b"other"
    assert region.mapping[MIB : MIB + 3] == b"own", "who came second placed nothing anew"
    other.communicate("\n", timeout=600)
    region.close()


def test_name_of_a_killed_process_is_removed_at_the_next_start(name: str) -> None:
    victim = start_mapper(name, 4 * MIB, 2, "victim")
    assert victim.stdout is not None
    assert victim.stdout.readline()
    assert path_of(name) not in remove_leftovers(), "its owner lives"
    assert path_of(name).exists()
    victim.kill()
    victim.wait(timeout=600)
    assert path_of(name).exists(), "a killed process removes nothing"
    other = f"{name}-next"
    SharedRegion(other, MIB, Bind((NODE,))).close()
    assert not path_of(name).exists()
    assert not path_of(other).exists()


def test_many_that_come_at_once_get_one_region(name: str) -> None:
    regions: list[SharedRegion] = []
    failures: list[BaseException] = []

    def join() -> None:
        try:
            regions.append(SharedRegion(name, 4 * MIB, Bind((NODE,)), mappers=8))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=join) for _ in range(8)]
    stop = time.monotonic() + 2
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and time.monotonic() < stop:
        remove_leftovers()  # another program that starts meanwhile
    for thread in threads:
        thread.join()
    assert not failures
    assert not path_of(name).exists()
    for at, region in enumerate(regions):
        region.mapping[at] = at + 1
    for region in regions:
        assert region.mapping[:8] == bytes(range(1, 9))
        region.close()


def test_another_size_is_refused_and_leaves_the_region_alone(name: str) -> None:
    region = SharedRegion(name, 2 * MIB, Bind((NODE,)), mappers=2)
    with pytest.raises(ValueError, match=f"made it for {2 * MIB} bytes, this one asks for {MIB}"):
        SharedRegion(name, MIB, Bind((NODE,)), mappers=2)
    assert path_of(name).exists()
    assert region.placement().granted == {NODE: 2 * MIB}
    region.close()
    assert not path_of(name).exists()


@pytest.mark.parametrize(
    ("nbytes", "placement", "message"),
    [
        (1000, "bind:0", "not whole pages"),
        (MIB, "bind:77", "node 77 has no memory"),
        (1 << 50, "bind:0", "/dev/shm has .* left; ask for less"),
    ],
)
def test_what_cannot_be_placed_is_refused_and_leaves_no_file(
    name: str, nbytes: int, placement: str, message: str
) -> None:
    with pytest.raises((ValueError, MemoryError), match=message):
        SharedRegion(name, nbytes, placement)
    assert not path_of(name).exists()


@pytest.mark.parametrize(("setting", "warns"), [("never", True), ("advise", False)])
def test_huge_pages_that_the_kernel_does_not_give_are_said(
    name: str, setting: str, warns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "shmem_enabled"
    file.write_text("always within_size advise never deny force\n".replace(setting, f"[{setting}]"))
    monkeypatch.setattr(shared_region, "_SHMEM_HUGE", file)
    region = SharedRegion(name, 4 * MIB, Bind((NODE,)), pages="thp")
    assert region.placement().granted == {NODE: 4 * MIB}
    assert any("base pages, not huge ones" in note for note in region.notes) == warns
    region.close()


def test_simulated_session_places_no_memory_of_others(name: str) -> None:
    session = Session.simulated(load_machine("epyc9354-cxl-a"))
    with pytest.raises(ValueError, match="a simulated machine has none"):
        SharedRegion(name, MIB, "bind:0", session=session)
    assert not path_of(name).exists()


def test_stripe_goes_on_from_part_to_part_on_one_node(name: str) -> None:
    region = SharedRegion(name, MIB, Weighted({NODE: 3}, granule_bytes=mmap.PAGESIZE))
    assert region.placement().granted == {NODE: MIB}
    region.close()
