"""Two ranks under torchrun: the same losses as stock on both, each rank's shard at its places."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cxl_offload.integrations.deepspeed.kinds import COPIED
from cxl_offload.topology import discover

from .conftest import ROOT, Train, environment, free_port
from .test_placement import PLACES, POLICY

CASES: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2, accumulation, clipping": {"stage": 2, "accumulation": 2, "clip": 0.5},
    "stage 2, no overlap, fp16": {"stage": 2, "overlap": False, "dtype": "fp16"},
    # Each rank has a GPU of its own, on another node.
    "stage 2, two GPUs": {"stage": 2, "gpu_nodes": [0, 1], "policy": None},
    "stage 3": {"stage": 3, "set": True},
    "stage 3, parameters offloaded": {"stage": 3, "offload_param": True, "accumulation": 2},
}


@pytest.fixture(scope="module")
def runs(train: Train, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[Any]]]:
    """By case: stock and placed, each a list of the ranks' results."""
    jobs = []
    folder = tmp_path_factory.mktemp("checkpoints")
    for at, case in enumerate(CASES.values()):
        jobs += [
            case | {"stock": True, "save": str(folder / f"stock-{at}")},
            {"policy": POLICY} | case | {"save": str(folder / f"tiers-{at}")},
        ]
    found = train(jobs, processes=2)
    return {name: found[2 * at : 2 * at + 2] for at, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_losses_are_bit_identical_to_stock_on_every_rank(
    runs: dict[str, list[list[Any]]], name: str
) -> None:
    stock, placed = runs[name]
    for one, other in zip(stock, placed, strict=True):
        assert one["losses"] == other["losses"]
        assert one["digest"] == other["digest"]
        assert one["after_save"] == other["after_save"] == other["reloaded"]
    assert stock[0]["losses"] != stock[1]["losses"]  # each had data of its own


@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_its_shard_at_its_places(
    runs: dict[str, list[list[Any]]], name: str
) -> None:
    for number, rank in enumerate(runs[name][1]):
        for kind, found in rank["pages"].items():
            assert found["placed"], kind
            places = PLACES[kind][1]
            if "gpu_nodes" in CASES[name]:
                places = [number if kind in COPIED else 0]
            assert set(found["nodes"]) <= set(places), kind
        rows = {row[0]: row[1] for row in rank["rows"]}
        assert rows["exp_avg"] == rows["fp32_master"]
        assert rank["held_after_destroy"] == 0
    both = [{row[0]: row[1] for row in rank["rows"]}["exp_avg"] for rank in runs[name][1]]
    assert both[0] == both[1]  # half of the states each


@pytest.mark.parametrize("name", CASES)
def test_checkpoint_of_two_ranks_is_not_larger_than_stock(
    runs: dict[str, list[list[Any]]], name: str
) -> None:
    stock, placed = (each[0]["checkpoint_bytes"] for each in runs[name])
    assert abs(placed / stock - 1) < 0.01


SHARES = """
import json, os, sys
import deepspeed, torch
from cxl_offload.integrations.deepspeed import placing
from cxl_offload.memory import Bind
from tests.integrations.deepspeed.tiny import TinyModel, config

deepspeed.init_distributed("gloo")
engines = []
with placing() as placed:
    for _ in range(2):
        model = TinyModel()
        engines.append(
            deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=config({"stage": 2})
            )[0]
        )
store = placed.engines[0].store
found = {
    "one_session": store.session is placed.engines[1].store.session,
    "may_hold": list(store.share.node_bytes.items()),
    "holds": store.session.stats().mapped_bytes.current,
}
node, most = found["may_hold"][0]
try:
    # Less than the node has, for a process that is alone.
    store.session.allocate(most + (64 << 20), Bind((node,)))
except MemoryError as error:
    found["refused"] = str(error)
with open(f"{sys.argv[1]}.{os.environ['RANK']}", "w") as file:
    json.dump(found, file)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def test_ranks_that_chose_no_session_never_exceed_a_node_together(
    deepspeed_there: None, tmp_path: Path
) -> None:
    script = tmp_path / "shares.py"
    script.write_text(SHARES)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += [f"--master-port={free_port()}", str(script), str(tmp_path / "found")]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(2),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(2)]
    capacity = {node.id: node.capacity_bytes for node in discover().usable_nodes()}
    for node, most in capacity.items():
        together = sum(dict(map(tuple, rank["may_hold"]))[node] for rank in ranks)
        assert together <= most
    for rank in ranks:
        assert rank["one_session"]
        assert rank["holds"] > 0
        assert "node" in rank["refused"]
