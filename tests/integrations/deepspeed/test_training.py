"""Training with its host tensors in tiers is training as before: same bits, all memory returned."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Job, Train

CASES: dict[str, Job] = {
    "stage 1, accumulation, clipping": {"stage": 1, "accumulation": 2, "clip": 0.5},
    "stage 2": {"stage": 2, "set": True},
    "stage 2, accumulation, no overlap": {"stage": 2, "accumulation": 3, "overlap": False},
    "stage 2, fp16, clipping": {"stage": 2, "dtype": "fp16", "clip": 0.5},
    "stage 2, pageable": {"stage": 2, "pin": False, "accumulation": 2, "set": True},
    "stage 3": {"stage": 3, "set": True, "clip": 0.5},
    "stage 3, parameters offloaded": {"stage": 3, "offload_param": True, "accumulation": 2},
    "stage 3, parameters offloaded, fp16, no overlap": {
        "stage": 3,
        "offload_param": True,
        "dtype": "fp16",
        "overlap": False,
        "set": True,
    },
}

# Every kind somewhere else than at its default.
SPREAD = {
    "fp32_master": "cxl",
    "fp32_grad": "rdram",
    "exp_avg": "cxl",
    "exp_avg_sq": "weighted:ldram=3,cxl=1@64KiB",
    "staging": "rdram",
    "temp_grad": "cxl",
    "grad_accumulation": "interleave:1,2@4KiB",
    "params": "interleave:0,1@16KiB",
}


@pytest.fixture(scope="module")
def runs(train: Train) -> dict[str, tuple[Any, Any, Any]]:
    """By case: stock, at its defaults, and spread over the tiers."""
    found: dict[str, tuple[Any, Any, Any]] = {}
    # Stage 3 replaces torch's linear for the life of the process, which changes the bits of others.
    for in_stage_3 in (False, True):
        cases = {name: job for name, job in CASES.items() if (job["stage"] == 3) is in_stage_3}
        jobs = list(cases.values())
        # Stock first: before this package has put an accelerator in place.
        stock = [job | {"stock": True} for job in jobs]
        results = train(stock + jobs + [job | {"policy": SPREAD} for job in jobs])
        for at, name in enumerate(cases):
            first, second, third = results[at :: len(jobs)]
            found[name] = (first, second, third)
    return found


@pytest.mark.parametrize("name", CASES)
def test_losses_are_bit_identical_to_stock_in_tiers(
    runs: dict[str, tuple[Any, Any, Any]], name: str
) -> None:
    stock, placed, spread = runs[name]
    assert stock["losses"] == placed["losses"] == spread["losses"]
    assert len(set(stock["losses"])) == len(stock["losses"])  # it did train
    assert float.fromhex(stock["losses"][0]) < 10


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_moments_are_bit_identical_to_stock_through_its_interface(
    runs: dict[str, tuple[Any, Any, Any]], name: str
) -> None:
    stock, placed, spread = runs[name]
    assert stock["digest"] == placed["digest"] == spread["digest"]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.get("set")])
def test_parameters_set_through_the_interface_are_trained_on(
    runs: dict[str, tuple[Any, Any, Any]], name: str
) -> None:
    stock, placed, spread = runs[name]
    assert [run["set_right"] for run in (stock, placed, spread)] == [True] * 3
    assert stock["losses"][-2:] == placed["losses"][-2:] == spread["losses"][-2:]


@pytest.mark.parametrize("name", CASES)
def test_every_byte_is_returned_by_destroy(
    runs: dict[str, tuple[Any, Any, Any]], name: str
) -> None:
    _, placed, spread = runs[name]
    for run in (placed, spread):
        assert run["held"] > 1 << 20
        if CASES[name].get("pin", True):
            assert run["held_after_destroy"] == 0
            assert run["mapped_after_destroy"] == 0


@pytest.mark.parametrize("name", CASES)
def test_every_object_has_a_storage_of_its_own_size(
    runs: dict[str, tuple[Any, Any, Any]], name: str
) -> None:
    for run in runs[name][1:]:
        assert all(kind["stored"] for kind in run["pages"].values()), run["pages"]
