"""Two plans beside each other: the gain, and what besides memory makes it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.plan.plan_file import Batch, CxlUse, Plan
from cxl_offload.plan.two_plans import compare_plans

FIRST = Plan(
    kind="inference",
    executor="vllm",
    runs=True,
    model="m",
    machine="here",
    command=("run",),
    batch=Batch(size=4, count=1, prompt=100, tokens=10),
    homes=(),
    node_bytes={},
    gpu_bytes=0,
    tokens_per_s=8.0,
    phases=(),
    cxl=CxlUse(used=False, gain=None, reason="none is there"),
)


@pytest.mark.parametrize(("rate", "gain"), [(8.0, 0.0), (10.0, 0.25), (6.0, -0.25)])
def test_gain_is_of_the_second_over_the_first(rate: float, gain: float) -> None:
    compared = compare_plans(FIRST, replace(FIRST, tokens_per_s=rate))
    assert (compared.gain, compared.notes) == (gain, ())


def test_what_differs_besides_memory_is_noted_once_each() -> None:
    other = replace(FIRST, batch=replace(FIRST.batch, size=64), machine="there")
    assert compare_plans(FIRST, other).notes == (), "batch and machine are what memory changes"
    (model,) = compare_plans(FIRST, replace(FIRST, model="n")).notes
    assert model == "the models differ: m and n"
    (lengths,) = compare_plans(FIRST, replace(FIRST, batch=replace(FIRST.batch, tokens=9))).notes
    assert "other work" in lengths
    (programs,) = compare_plans(FIRST, replace(FIRST, executor="flexgen")).notes
    assert "for vllm, the second for flexgen" in programs


def test_no_gain_is_of_other_models_or_lengths() -> None:
    other = replace(FIRST, batch=replace(FIRST.batch, tokens=9))
    assert compare_plans(FIRST, replace(FIRST, model="n")).gain is None
    assert compare_plans(FIRST, other).gain is None
    assert compare_plans(other, other).gain == 0
    assert compare_plans(replace(FIRST, tokens_per_s=0.0), FIRST).gain is None


def test_inference_is_not_compared_with_training() -> None:
    training = replace(FIRST, kind="training", executor="deepspeed")
    with pytest.raises(ConfigError, match="the first plan is of inference and the second of train"):
        compare_plans(FIRST, training)
    assert compare_plans(training, training).gain == 0
