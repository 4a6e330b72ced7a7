"""Cases that ask the planner."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.transformers.plan import TransformersRequest, plan_transformers
from cxl_offload.topology import load_machine
from cxl_offload.validation import PUBLISHED_CASES
from cxl_offload.validation.casefile import load_cases, parse_cases
from cxl_offload.validation.report import Result, validate

ASKED: dict[str, Any] = {
    "system": "xeon8468",
    "plan_model": "llama-3-8b",
    "executor": "transformers",
    "prompt_len": 128,
    "gen_len": 32,
}


def answered(**inputs: Any) -> Result:
    entry = {
        "id": "made",
        "source": "made",
        "description": "made",
        "model": "plan",
        "inputs": {**ASKED, **inputs},
        "expected": {"op": "at_least", "value": 0},
        "kind": "speed",
        "group": "plan",
        "status": "derived",
        "use": "property",
    }
    (case,) = parse_cases(json.dumps([entry]), file="made.json")
    (result,) = validate([case])
    return result


def test_shipped_cases_of_plans_pass() -> None:
    results = validate(load_cases(PUBLISHED_CASES.with_name("plans.json")))
    assert len(results) == 13
    assert [result.case.id for result in results if not result.passes] == []


def test_answer_is_what_the_planner_says() -> None:
    plan = plan_transformers(
        TransformersRequest(
            model=load_model("llama-3-8b"),
            machine=load_machine("xeon8468"),
            prompt=128,
            generated=32,
            model_name="llama-3-8b",
            replay=None,
        )
    )
    assert answered(metric="tokens_per_s").predicted == pytest.approx(plan.tokens_per_s)
    assert answered(metric="sequences").predicted == plan.batch.size * plan.batch.count
    held = answered(metric="tier_gib", tier="ldram").predicted
    assert held == pytest.approx(plan.node_bytes[0] / 2**30)
    assert answered(metric="ratio", a={}, b={"gen_len": 32}).predicted == 1
    order = answered(metric="order", requests=[{"prompt_len": 1024}, {"prompt_len": 16}])
    assert order.predicted == [1, 0]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"metric": "speed"}, "metric"),
        ({"metric": "tokens_per_s", "executor": "torch"}, "executor"),
        ({"metric": "ratio", "a": {"typo": 1}, "b": {}}, "typo"),
        ({"metric": "tokens_per_s", "plan_model": "opt-175b", "tiers": ["cxl"]}, "are missing"),
    ],
)
def test_what_cannot_be_answered_says_why(inputs: dict[str, Any], said: str) -> None:
    result = answered(**inputs)
    assert not result.passes
    assert said in result.note
