"""Cases that ask the planner."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.transformers.plan import TransformersRequest, plan_transformers
from cxl_offload.topology import load_machine
from cxl_offload.validation import PLAN_CASES, absolute_errors
from cxl_offload.validation.casefile import load_cases, parse_cases
from cxl_offload.validation.report import Result, validate

MISSED = {
    "plan-zero3-over-zero2-v100-13b": "up to 2.3 is printed, without the batch that gives it; 1.1",
}

ASKED: dict[str, Any] = {
    "system": "xeon8468",
    "plan_model": "llama-3-8b",
    "executor": "transformers",
    "prompt_len": 128,
    "gen_len": 32,
}


def entry(name: str, expected: dict[str, Any], **inputs: Any) -> dict[str, Any]:
    return {
        "id": name,
        "source": "made",
        "description": "made",
        "model": "plan",
        "inputs": {**ASKED, **inputs},
        "expected": expected,
        "kind": "speed",
        "group": "plan",
        "status": "derived",
        "use": "property",
    }


def answered(**inputs: Any) -> Result:
    made = entry("made", {"op": "at_least", "value": 0}, **inputs)
    (case,) = parse_cases(json.dumps([made]), file="made.json")
    (result,) = validate([case])
    return result


def test_shipped_cases_of_plans_pass() -> None:
    results = validate(load_cases(PLAN_CASES))
    assert len(results) >= 53
    assert {result.case.id for result in results if not result.passes} == set(MISSED)


def test_answer_is_what_the_planner_says() -> None:
    plan = plan_transformers(
        TransformersRequest(
            model=load_model("llama-3-8b"),
            machine=load_machine("xeon8468"),
            prompt=128,
            generated=32,
            model_name="llama-3-8b",
            replay=None,
            prices=False,
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


SERVED = {"system": "dgx-h100", "plan_model": "qwen3-8b", "executor": "vllm", "gen_len": 64}


def test_absolute_results_are_within_the_bar() -> None:
    """Median within 15 %, none off by more than 1.4x, of those that nothing was fitted to too."""
    results = validate(load_cases(PLAN_CASES))
    held_out = [each for each in results if "fitted to" not in each.case.description]
    for some in (results, held_out):
        found = absolute_errors(some)
        assert found is not None
        assert found.cases >= 30
        assert (found.unanswered, found.beyond) == (0, 0)
        assert found.median <= 0.15
        assert found.worst <= 1.4


def test_a_miss_counts_as_measured_and_one_without_an_answer_is_counted_apart() -> None:
    values = (100.0, 50.0, 10.0, 10.0)
    cases = [
        entry("absolute", {"op": "approx", "value": value}, metric="decode_tokens_per_s")
        for value in values[:2]
    ]
    cases += [entry("order", {"op": "at_least", "value": 1}, metric="decode_tokens_per_s")]
    cases += [
        entry("none", {"op": "approx", "value": 1.0}, metric="tokens_per_s", plan_model="nothing")
    ]
    results = validate(parse_cases(json.dumps(cases), file="made.json"))
    speed = results[0].predicted
    assert isinstance(speed, float)
    ratios = sorted(max(speed / each, each / speed) for each in values[:2])
    found = absolute_errors(results)
    assert found is not None
    assert (found.cases, found.unanswered) == (3, 1)
    assert found.median == pytest.approx(sum(ratios) / 2 - 1)
    assert found.worst == pytest.approx(ratios[1])
    assert found.beyond == sum(each > 1.4 for each in ratios) > 0
    assert absolute_errors(results[2:3]) is None


def test_requests_at_once_are_those_of_the_served_wave() -> None:
    one = answered(**SERVED, prompt_len=512, num_prompts=1, metric="tokens_per_s").predicted
    some = answered(**SERVED, prompt_len=512, num_prompts=300, metric="tokens_per_s").predicted
    spread = answered(
        **SERVED, prompt_len=512, num_prompts=300, answers="spread", metric="tokens_per_s"
    ).predicted
    endless = answered(**SERVED, prompt_len=512, metric="tokens_per_s").predicted
    assert isinstance(one, float)
    assert isinstance(some, float)
    assert isinstance(spread, float)
    assert isinstance(endless, float)
    assert one < spread < some < endless  # the last of a wave run alone, the longest for long
    first = answered(**SERVED, prompt_len=512, num_prompts=300, metric="ttft_s").predicted
    alone = answered(**SERVED, prompt_len=512, num_prompts=1, metric="ttft_s").predicted
    assert isinstance(first, float)
    assert isinstance(alone, float)
    assert first > 10 * alone


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"num_prompts": 5}, "num_prompts: requests that come at once are served by executor vllm"),
        ({"executor": "vllm", "num_prompts": 0}, "num_prompts"),
        ({"executor": "vllm", "num_prompts": 5, "metric": "sequences"}, "of num_prompts: one of"),
        ({"metric": "ttft_s"}, "executor vllm has it"),
        ({"executor": "deepspeed", "batch": 8, "stage": 4}, "stage = 4, want 1, 2 or 3"),
    ],
)
def test_requests_that_mean_nothing_are_refused(inputs: dict[str, Any], message: str) -> None:
    asked = {"system": "dgx-h100", "metric": "tokens_per_s", **inputs}
    if inputs.get("metric") == "ttft_s":
        asked["system"] = "xeon8468"
    assert message in answered(**asked).note


def test_gpus_stage_sockets_and_kv_types_reach_the_planner() -> None:
    one = answered(**SERVED, prompt_len=512, metric="per_token_s").predicted
    two = answered(**SERVED, prompt_len=512, gpus=8, metric="per_token_s").predicted
    assert one != two
    trained = {"system": "epyc9354-cxl-a", "executor": "deepspeed", "plan_model": "opt-1.3b"}
    trained |= {"batch": 16, "metric": "step_s", "prompt_len": 512}
    seconds = [
        answered(**trained, **more).predicted
        for more in ({}, {"gpus": 4}, {"gpus": 4, "hosts": 2, "network_gb_s": 1}, {"stage": 3})
    ]
    assert len(set(seconds)) == 4
    assert None not in seconds
    plain = answered(metric="decode_tokens_per_s").predicted
    kept = answered(metric="decode_tokens_per_s", kv_dtype="int4", prompt_len=4096).predicted
    full = answered(metric="decode_tokens_per_s", prompt_len=4096).predicted
    assert isinstance(kept, float)
    assert isinstance(full, float)
    assert kept > full
    assert answered(metric="decode_tokens_per_s", sockets=2).predicted != plain
