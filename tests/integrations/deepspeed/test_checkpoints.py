"""Checkpoints are DeepSpeed's own: with and without this package, in both directions, no larger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .conftest import Train
from .test_placement import PLACES, POLICY

STAGES: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "2": {"stage": 2, "accumulation": 2},
    "3": {"stage": 3, "offload_param": True},
}


@pytest.fixture(scope="module")
def runs(train: Train, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """For every stage: saved by each, then loaded by the other and by itself."""
    jobs: list[dict[str, Any]] = []
    names: list[tuple[str, str]] = []
    folder = tmp_path_factory.mktemp("checkpoints")
    for stage, job in STAGES.items():
        stock, tiers = str(folder / f"stock-{stage}"), str(folder / f"tiers-{stage}")
        resumed = job | {"steps": 2, "seed": 3}
        made = {
            "stock": job | {"stock": True, "save": stock},
            "tiers": job | {"policy": POLICY, "save": tiers},
            "tiers to stock": resumed | {"stock": True, "load": tiers},
            "stock to tiers": resumed | {"policy": POLICY, "load": stock},
            "tiers to tiers": resumed | {"policy": POLICY, "load": tiers},
        }
        jobs += made.values()
        names += [(stage, name) for name in made]
    assert not list(Path(folder).iterdir())
    found: dict[str, dict[str, Any]] = {stage: {} for stage in STAGES}
    for (stage, name), result in zip(names, train(jobs), strict=True):
        found[stage][name] = result
    return found


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", ["tiers to stock", "stock to tiers", "tiers to tiers"])
def test_training_resumes_bit_identical_from_a_checkpoint(
    runs: dict[str, dict[str, Any]], stage: str, way: str
) -> None:
    saved = runs[stage]["stock"]
    assert runs[stage][way]["losses"] == saved["after_save"]
    assert runs[stage]["tiers"]["after_save"] == saved["after_save"]
    assert saved["after_save"] != saved["losses"][-len(saved["after_save"]) :]


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_that_loads_its_own_checkpoint_again_trains_the_same(
    runs: dict[str, dict[str, Any]], stage: str
) -> None:
    run = runs[stage]["tiers"]
    assert run["reloaded"] == run["after_save"] == runs[stage]["stock"]["reloaded"]


@pytest.mark.parametrize("stage", STAGES)
def test_checkpoint_is_not_larger_than_stock(runs: dict[str, dict[str, Any]], stage: str) -> None:
    stock = runs[stage]["stock"]["checkpoint_bytes"]
    assert stock > 1 << 20
    assert abs(runs[stage]["tiers"]["checkpoint_bytes"] / stock - 1) < 0.01


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["tiers", "stock to tiers", "tiers to tiers"])
def test_states_are_at_their_places_again_after_loading(
    runs: dict[str, dict[str, Any]], stage: str, name: str
) -> None:
    run = runs[stage][name]
    for kind, found in run["pages"].items():
        assert found["placed"], kind
        assert set(found["nodes"]) <= set(PLACES[kind][1]), kind
    assert run["missed"] == []
    assert run["held_after_destroy"] == 0
