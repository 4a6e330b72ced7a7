"""Why a plan is as it is: what each other placement would have cost."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.plan.flexgen.plan import InferenceRequest, plan_inference
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import load_plan
from cxl_offload.plan.training.plan import TrainingRequest, plan_training
from cxl_offload.plan.transformers.plan import TransformersRequest, plan_transformers
from cxl_offload.topology import load_machine

ASKED = TransformersRequest(
    model=load_model("llama-65b"),
    machine=load_machine("epyc9354-cxl-a"),
    prompt=512,
    generated=32,
    model_name="llama-65b",
    replay=None,
    why=True,
)


def rate_in(reasons: tuple[str, ...], begin: str) -> float:
    (sentence,) = [reason for reason in reasons if reason.startswith(begin)]
    return float(re.search(r": ([0-9.]+) tokens/s", sentence)[1])  # type: ignore[index]


def test_every_tier_and_kind_has_a_reason_that_is_not_faster() -> None:
    plan = plan_transformers(ASKED)
    for tier in ("ldram", "rdram", "cxl"):
        assert any(f" {tier}" in reason for reason in plan.why)
    for kind in ("attention", "mlp", "kv"):
        assert any(reason.startswith(f"{kind} ") for reason in plan.why)
    faster = [reason for reason in plan.why if "faster" in reason]
    assert any("--sockets 2" in reason for reason in plan.why)  # cores that were not asked for
    faster = [reason for reason in faster if "--sockets" not in reason]
    if not plan.cxl.used:  # then it brings less than the margin
        faster = [reason for reason in faster if " on cxl too: " not in reason]
        assert plan.cxl.gain is not None
        assert plan.cxl.gain < ASKED.cxl_margin
    assert not faster
    assert "mlp on the GPU instead: not one batch would fit" in plan.why


def test_cost_of_a_tier_is_that_of_planning_without_it() -> None:
    plan = plan_transformers(ASKED)
    alone = plan_transformers(replace(ASKED, tiers=("ldram", "cxl"), why=False))
    assert "rdram" in {home.where for home in plan.homes}
    assert rate_in(plan.why, "without rdram") == pytest.approx(alone.tokens_per_s, rel=1e-3)
    assert alone.why == ()


def test_tier_that_is_left_alone_says_what_it_would_bring() -> None:
    flexgen = plan_inference(
        InferenceRequest(
            model=load_model("opt-30b"),
            machine=ASKED.machine,
            prompt=512,
            generated=32,
            model_name="opt-30b",
            replay=None,
            gpu_batches=(64,),
            why=True,
        )
    )
    assert any(reason.startswith(("with", "without")) for reason in flexgen.why)
    assert any("striped" in reason for reason in flexgen.why)
    training = plan_training(
        TrainingRequest(
            model=load_model("opt-1.3b"),
            machine=ASKED.machine,
            batch=4,
            tokens=256,
            replay=None,
            why=True,
        )
    )
    assert any("ZeRO stage" in reason for reason in training.why)


def test_command_prints_the_reasons_and_the_file_keeps_them(tmp_path: Path) -> None:
    arguments = ["plan", "inference", "--model", "llama-3-8b", "--machine", "xeon8468", "--why"]
    made = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "plan.yaml")])
    assert made.exit_code == 0, made.output
    assert "Why so (predicted)" in made.output
    assert load_plan(tmp_path / "plan.yaml").why
