"""CPUAdam(overlap=True) under ZeRO-Offload: begun in the backward, and the bits of one step."""

from __future__ import annotations

import re
from typing import Any

import pytest

from .conftest import Job, Train
from .test_placement import POLICY
from .tiny import TinyModel

OWN: Job = {
    "optimizer": "CPUAdam",
    "policy": POLICY,
    "bf16": {"check_grad_overflow": False},
}
EARLY: Job = OWN | {"options": {"overlap": True}}
CASES: dict[str, Job] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2, "set": True},
    "stage 2, accumulation": {"stage": 2, "accumulation": 3},
    "stage 2, no overlap of communication, pageable": {
        "stage": 2,
        "overlap": False,
        "pin": False,
    },
}
REFUSED: dict[str, tuple[Job, str]] = {
    "clipping": ({"stage": 2, "clip": 0.5}, "gradient_clipping .* set it to 0"),
    "fp16": ({"stage": 2, "dtype": "fp16"}, "use bf16"),
    "steps that may be skipped": (
        {"stage": 2, "bf16": {}},
        "check_grad_overflow .* set it to false",
    ),
    "stage 3": ({"stage": 3}, "use stage 2"),
    "8 bits": ({"stage": 2, "narrow_states": True}, "use float32 states"),
    "late clipping": (
        {"stage": 2, "options": {"overlap": True, "late_max_norm": 1.0}},
        "late_max_norm .* leave it out",
    ),
}


@pytest.fixture(scope="module")
def runs(train: Train) -> dict[str, tuple[Any, Any]]:
    """By case: without and with updates in the backward."""
    jobs = list(CASES.values())
    found = train([OWN | job for job in jobs] + [EARLY | job for job in jobs])
    return {name: (found[at], found[at + len(jobs)]) for at, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_losses_parameters_and_moments_are_the_same_bits(
    runs: dict[str, tuple[Any, Any]], name: str
) -> None:
    late, early = runs[name]
    assert late["losses"] == early["losses"]
    assert late["digest"] == early["digest"]
    assert len(set(early["losses"])) == len(early["losses"])


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_is_updated_before_the_step(
    runs: dict[str, tuple[Any, Any]], name: str
) -> None:
    late, early = runs[name]
    steps = 4
    assert late["early_elements"] == 0
    assert early["early_elements"] == steps * sum(p.numel() for p in TinyModel().parameters())


@pytest.mark.parametrize("name", CASES)
def test_no_more_memory_is_held_at_the_end(runs: dict[str, tuple[Any, Any]], name: str) -> None:
    late, early = runs[name]
    assert early["held_after_destroy"] == late["held_after_destroy"]


def test_checkpoint_goes_on_with_the_same_bits(
    train: Train, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folders = [str(tmp_path_factory.mktemp(name)) for name in ("late", "early")]
    jobs = [
        own | {"stage": 2, "save": folder}
        for own, folder in zip((OWN, EARLY), folders, strict=True)
    ]
    late, early = train(jobs)
    for name in ("after_save", "reloaded"):
        assert late[name] == early[name]
    assert early["after_save"] == early["reloaded"]


def test_two_ranks_have_the_same_bits(train: Train) -> None:
    jobs = [OWN | {"stage": 2}, EARLY | {"stage": 2}]
    late, early = train(jobs, processes=2)
    for one, other in zip(late, early, strict=True):
        assert one["losses"] == other["losses"]
        assert one["digest"] == other["digest"]
        assert other["early_elements"] > 0


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_need_all_gradients_first_are_refused(train: Train, name: str) -> None:
    job, said = REFUSED[name]
    (found,) = train([EARLY | job | {"what": "refused settings"}])
    assert re.search(r"CPUAdam\(overlap=True\) under DeepSpeed: .*" + said, found["error"])
