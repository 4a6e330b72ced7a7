"""This package's CPUAdam as DeepSpeed's optimizer, its states placed by kind too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import Train
from .test_placement import PLACES, POLICY
from .tiny import TinyModel

STAGES: list[dict[str, Any]] = [{"stage": 1}, {"stage": 2}, {"stage": 3, "offload_param": True}]


@pytest.fixture(scope="module")
def runs(train: Train, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """By stage: DeepSpeed's optimizer for one step and for four, ours for the same."""
    folder = tmp_path_factory.mktemp("values")
    jobs = []
    for job in STAGES:
        own = job | {"optimizer": "CPUAdam", "policy": POLICY}
        one, other = (str(folder / f"{name}-{job['stage']}") for name in ("theirs", "own"))
        jobs += [job | {"stock": True, "steps": 1, "dump": one}, job | {"stock": True}]
        jobs += [own | {"steps": 1, "dump": other}, own]
    found = train(jobs)
    for result, job in zip(found, jobs, strict=True):
        result["dump"] = job.get("dump")
    return [found[4 * at : 4 * at + 4] for at in range(len(STAGES))]


@pytest.mark.parametrize("at", range(len(STAGES)), ids=["1", "2", "3"])
def test_parameters_and_moments_are_those_of_deepspeed_within_rounding(
    runs: list[list[Any]], at: int
) -> None:
    theirs, _, own, _ = runs[at]
    first = torch.load(Path(theirs["dump"]))
    second = torch.load(Path(own["dump"]))
    assert len(first) == len(second) > 30
    for one, other in zip(first, second, strict=True):
        # One step of lr 1e-2: errors of the update are a few parts in 1e7 of it.
        torch.testing.assert_close(one, other, rtol=5e-7, atol=1e-8)


@pytest.mark.parametrize("at", range(len(STAGES)), ids=["1", "2", "3"])
def test_parameters_are_those_of_adamw_in_double_precision_within_rounding(
    runs: list[list[Any]], at: int
) -> None:
    torch.manual_seed(0)
    begun = [param.detach().bfloat16().double() for param in TinyModel().parameters()]
    values = torch.load(Path(runs[at][2]["dump"]))
    lr, decay, beta, eps = 1e-2, 0.01, 0.9, 1e-8
    for before, after, moment in zip(begun, values[0::3], values[1::3], strict=True):
        # After one step the corrected moments are the gradient and its square.
        grad = moment.double() / (1 - beta)
        oracle = before * (1 - lr * decay) - lr * grad / (grad.abs() + eps)
        torch.testing.assert_close(after.double(), oracle, rtol=2e-7, atol=5e-9)
        assert (after.double() - before).abs().max() > lr / 2


@pytest.mark.parametrize("at", range(len(STAGES)), ids=["1", "2", "3"])
def test_losses_follow_those_of_deepspeed(runs: list[list[Any]], at: int) -> None:
    # A rounding of fp32 may turn over one of bf16, which later losses feel.
    losses = [[float.fromhex(loss) for loss in run["losses"]] for run in runs[at]]
    assert losses[3] == pytest.approx(losses[1], rel=2e-3)
    assert losses[3][0] == losses[1][0]


@pytest.mark.parametrize("at", range(len(STAGES)), ids=["1", "2", "3"])
def test_its_states_are_at_the_places_of_their_kinds(runs: list[list[Any]], at: int) -> None:
    pages = runs[at][3]["pages"]
    for kind in ("exp_avg", "exp_avg_sq", "fp32_master"):
        assert pages[kind]["placed"]
        assert pages[kind]["nodes"] == PLACES[kind][1]
    assert runs[at][3]["held_after_destroy"] == 0


def test_states_of_8_bits_train_like_float32_and_are_at_the_places_of_their_kinds(
    train: Train, runs: list[list[Any]]
) -> None:
    own = {"optimizer": "CPUAdam", "policy": POLICY, "narrow_states": True}
    found = train([job | own for job in STAGES])
    for narrow, (_, stock, _, wide) in zip(found, runs, strict=True):
        losses = [float.fromhex(loss) for loss in narrow["losses"]]
        wanted = [float.fromhex(loss) for loss in stock["losses"]]
        assert losses[0] == wanted[0]
        assert losses == pytest.approx(wanted, rel=2e-2)
        assert losses != wanted
        for kind in ("exp_avg", "exp_avg_sq"):
            assert narrow["pages"][kind]["placed"]
            # Too few pages for every node of a kind that is spread.
            assert set(narrow["pages"][kind]["nodes"]) <= set(PLACES[kind][1])
        assert narrow["held_after_destroy"] == 0
        assert wide["losses"] != narrow["losses"]
