"""Real processes over gloo that divide a machine: never more than a node has, together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cxl_offload
from cxl_offload import load_machine
from cxl_offload.ranks import share_machine

GIB = 1 << 30
MIB = 1 << 20
ROOT = Path(__file__).parents[2]


def run_ranks(
    folder: Path, size: int, *flags: str, options: tuple[dict[int, Any], ...] = ({},)
) -> list[list[dict[str, Any]]]:
    """What every rank wrote, for each of ``options``; they ask one after the other."""
    store = folder / "store"
    command = [sys.executable, "-m", "tests.ranks.rank_worker", "--size", str(size)]
    command += ["--store", str(store), "--options", json.dumps(options), *flags]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    written = [Path(f"{store}.{rank}").read_text().splitlines() for rank in range(size)]
    told = [[json.loads(line) for line in lines] for lines in written]
    return [list(each) for each in zip(*told, strict=True)]


@pytest.mark.slow(reason="starts ranks that load torch")
def test_ranks_on_a_simulated_machine_fill_a_node_exactly(tmp_path: Path) -> None:
    size, capacity = 3, 96 * MIB + 4096
    limits = {rank: {"limits": {"2": capacity}} for rank in range(size)}
    (told,) = run_ranks(tmp_path, size, "--machine", "spr-1", "--fill", "2", options=(limits,))
    assert [rank["local"] for rank in told] == [[at, size] for at in range(size)]
    assert sum(rank["bytes"]["2"] for rank in told) == capacity
    assert sum(rank["held"] for rank in told) == capacity
    assert all(rank["held"] > 0 for rank in told)


@pytest.mark.slow(reason="starts two processes with torch")
def test_ranks_take_the_dram_of_their_own_socket_and_half_of_the_cxl_tier(tmp_path: Path) -> None:
    machine = load_machine("spr-1")
    ((first, second),) = run_ranks(tmp_path, 2, "--machine", "spr-1")
    assert (first["home"], second["home"]) == (0, 1)
    assert (first["ldram"], second["ldram"]) == ([0], [1])
    dram = machine.node(0).capacity_bytes
    cxl = machine.node(2).capacity_bytes
    assert first["bytes"] == {"0": dram, "1": 0, "2": cxl // 2}
    assert second["bytes"] == {"0": 0, "1": dram, "2": cxl // 2}


@pytest.fixture(scope="module")
def of_one_gpu(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Two ranks of a machine with one GPU: no wish, one, too many, a wrong one."""
    wants: tuple[dict[int, Any], ...] = (
        {},
        {1: {"requests": {"cxl": 100 * GIB}}},
        {0: {"requests": {"cxl": 200 * GIB}}, 1: {"requests": {"cxl": 100 * GIB}}},
        {1: {"requests": {"7": 1}}},
    )
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(folder, 2, "--machine", "spr3-h100", options=wants)


def test_ranks_of_one_gpu_machine_stay_near_it(of_one_gpu: list[list[dict[str, Any]]]) -> None:
    told = of_one_gpu[0]
    assert [(rank["gpu"], rank["home"]) for rank in told] == [("H100", 0)] * 2
    assert [rank["bytes"]["0"] for rank in told] == [128 * GIB] * 2


def test_requests_are_kept_for_the_rank_that_asks(of_one_gpu: list[list[dict[str, Any]]]) -> None:
    first, second = of_one_gpu[1]
    assert (first["bytes"]["2"], second["bytes"]["2"]) == (78 * GIB, 178 * GIB)


def test_error_of_one_rank_is_raised_on_all_and_none_waits(
    of_one_gpu: list[list[dict[str, Any]]],
) -> None:
    (told, other), unknown = of_one_gpu[2], of_one_gpu[3]
    assert told == other
    assert "rank 0 200 GiB of tier cxl, rank 1 100 GiB of tier cxl" in told["error"]
    assert unknown[0] == unknown[1]
    assert unknown[0]["error"].startswith("rank 1: machine spr3-h100 has no node 7")


@pytest.mark.slow(reason="starts two processes with torch")
def test_ranks_on_this_machine_keep_within_the_limit_of_a_real_node(tmp_path: Path) -> None:
    node = cxl_offload.discover().usable_nodes()[0].id
    limits = {rank: {"limits": {str(node): 32 * MIB + 4096 * rank}} for rank in range(2)}
    (told,) = run_ranks(tmp_path, 2, "--fill", str(node), options=(limits,))
    # Of different wishes the least holds.
    assert [rank["bytes"][str(node)] for rank in told] == [16 * MIB] * 2
    assert [rank["held"] for rank in told] == [16 * MIB] * 2


def test_limit_of_a_device_is_refused_because_ranks_share_nodes() -> None:
    with pytest.raises(
        ValueError, match=r"limit of dax0\.0: ranks share nodes only; leave it out$"
    ):
        share_machine(load_machine("spr3-h100"), limits={"dax0.0": "1GiB"})


def test_process_without_a_job_gets_the_whole_machine() -> None:
    share = share_machine(load_machine("spr3-h100"))
    assert (share.rank, share.local_size, share.gpu) == (0, 1, "H100")
    assert dict(share.node_bytes) == {0: 256 * GIB, 1: 256 * GIB, 2: 256 * GIB}
    session = share.session()
    assert session.kernel.local_node == 0
    with cxl_offload.use(session):
        tensor = cxl_offload.zeros(1 << 20, policy="cxl")
        assert set(cxl_offload.placement_of(tensor).granted) == {2}
    with pytest.raises(ValueError, match="give 0 or more"):
        share_machine(load_machine("spr3-h100"), requests={2: -1})
