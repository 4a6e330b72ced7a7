"""Two ranks under torchrun: the same losses as stock on both, each rank's shard at its places."""

from __future__ import annotations

from typing import Any

import pytest

from cxl_offload.integrations.deepspeed.kinds import COPIED

from .conftest import Train
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
