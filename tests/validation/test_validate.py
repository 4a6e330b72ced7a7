from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from cxl_offload.validation import (
    MODELS,
    PUBLISHED_CASES,
    Case,
    Result,
    load_cases,
    parse_cases,
    pass_rates,
    predict,
    validate,
)


@pytest.fixture(scope="module")
def results() -> list[Result]:
    return validate(load_cases(PUBLISHED_CASES))


def published() -> Iterator[dict[str, Any]]:
    yield from json.loads(PUBLISHED_CASES.read_text(encoding="utf-8"))


def one_case_a_model() -> dict[str, dict[str, Any]]:
    plans = PUBLISHED_CASES.with_name("plans.json").read_text(encoding="utf-8")
    return {case["model"]: case for case in [*published(), *json.loads(plans)]}


def test_every_public_model_has_published_cases() -> None:
    assert set(MODELS) == set(one_case_a_model())


def test_rules_and_properties_all_pass_and_predictions_nearly_all(results: list[Result]) -> None:
    rates = {rate.name: rate for rate in pass_rates(results, lambda result: result.case.use)}
    assert rates["semantics"].share == 1
    assert rates["property"].share == 1
    assert rates["predict"].share >= 0.95
    assert sum(rate.cases for rate in rates.values()) == len(results) == 113


def test_answers_do_not_depend_on_names_or_order(results: list[Result]) -> None:
    renamed = [
        {**case, "id": f"x{index}", "description": "", "source": "", "group": "g", "use": "u"}
        for index, case in enumerate(published())
    ]
    random.Random(1).shuffle(renamed)
    again = validate(parse_cases(json.dumps(renamed), file="shuffled"))
    by_index = {int(result.case.id[1:]): result.predicted for result in again}
    assert [by_index[index] for index in range(len(results))] == [r.predicted for r in results]


def test_json_of_results_is_plain(results: list[Result]) -> None:
    text = json.dumps([result.as_json() for result in results], allow_nan=False)
    entry = json.loads(text)[0]
    assert set(entry) == {"id", "predicted", "expected", "error", "pass", "group", "note"}


@pytest.mark.parametrize("model", sorted(MODELS))
def test_unknown_input_is_an_error_that_names_it(model: str) -> None:
    inputs = {**one_case_a_model()[model]["inputs"], "btach": 1}
    with pytest.raises(ValueError, match="unknown key 'btach'"):
        predict(model, inputs)


def refusal(model: str, inputs: dict[str, Any]) -> str | None:
    """Why inputs are refused, None where they are not; any error but ValueError gets out."""
    try:
        predict(model, inputs)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("model", sorted(MODELS))
def test_missing_or_wrong_input_is_refused_by_name_where_it_is_used(model: str) -> None:
    inputs = one_case_a_model()[model]["inputs"]
    for key in inputs:
        reasons = [refusal(model, {name: inputs[name] for name in inputs if name != key})]
        wrong: object
        for wrong in ("text", True, [], {}, [None]):
            if type(wrong) is not type(inputs[key]):
                reasons.append(refusal(model, {**inputs, key: wrong}))
        assert all(reason is None or len(reason) > 10 for reason in reasons)
        if reasons[0] is not None:  # needed, so that nothing wrong in its place is accepted
            assert None not in reasons, f"{key} of {model}"


@pytest.mark.parametrize("model", sorted(MODELS))
def test_number_below_zero_is_refused_but_for_steps_states_and_slowdowns(model: str) -> None:
    inputs = one_case_a_model()[model]["inputs"]
    signed = {"start_step", "prev_state_init", "optimizer_slowdown", "transfer_slowdown"}
    needed = [
        key
        for key, value in inputs.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key not in signed
        if refusal(model, {name: inputs[name] for name in inputs if name != key}) is not None
    ]
    for key in needed:
        reason = refusal(model, {**inputs, key: -1})
        assert reason is not None
        assert key in reason


def test_unknown_key_of_an_inner_object_is_named() -> None:
    inputs = one_case_a_model()["footprint"]["inputs"]
    with pytest.raises(ValueError, match=r"'widht' in llm.*'width'"):
        predict("footprint", {**inputs, "llm": {**inputs["llm"], "widht": 1}})


def case(model: str, inputs: dict[str, object]) -> Case:
    text = json.dumps([{
        "id": "made", "model": model, "inputs": inputs, "use": "predict", "group": model,
        "expected": {"op": "approx", "value": 1}, "tolerance_suggestion": {"rel": 0.1},
    }])  # fmt: skip
    (made,) = parse_cases(text, file="made.json")
    return made


@pytest.mark.parametrize(
    ("model", "inputs", "reason"),
    [
        ("no_model", {}, "no model is called 'no_model'"),
        ("concurrency", {"threads": 4}, "'bandwidth_gb_s' is missing"),
        ("concurrency", {"threads": 0, "bandwidth_gb_s": 1, "latency_ns": 1}, "threads = 0"),
        ("gpu_copy_time", {"system": "nowhere", "bytes": 1, "metric": "time_ms",
                           "sources": [{"ldram": 1}]}, "nowhere"),
        ("gpu_copy_time", {"system": "none", "bytes": 1, "metric": "time_ms",
                           "sources": [{"ldram": 1}]}, "needs a machine file"),
        ("latency_factor", {"latency_ns": [1, 2], "weights": [1]}, "one a tier"),
        ("ratio_change", {"from_weights": [1, 1], "to_weights": [1, 0]}, "unbounded"),
        ("ratio_change", {"from_weights": [0, 1], "to_weights": [1, 1]}, "unbounded"),
        ("concurrency", {"threads": 1, "bandwidth_gb_s": 10**400, "latency_ns": 1}, "made"),
    ],
)  # fmt: skip
def test_case_that_cannot_be_answered_fails_with_its_reason_and_line(
    model: str, inputs: dict[str, object], reason: str
) -> None:
    (result,) = validate([case(model, inputs)])
    assert not result.passes
    assert result.predicted is None
    assert result.note.startswith("line 1: not answered:")
    if reason != "made":
        assert reason in result.note


def test_wrong_case_beside_sound_ones_fails_alone() -> None:
    sound = next(published())
    text = json.dumps([sound, {"id": "broken"}, sound])
    assert [r.passes for r in validate(parse_cases(text, file="f"))] == [True, False, True]


def test_pages_that_find_no_node_are_said() -> None:
    answer = predict("weights_to_pages", {"weights": [1], "pages": 5, "capacity_pages": [3]})
    assert answer.value == [3]
    assert answer.notes == ("2 of 5 pages find every node of their weights full",)


def test_third_tier_takes_part_in_search_ratio_and_training() -> None:
    inputs = one_case_a_model()
    search = inputs["flexgen_search"]["inputs"]
    two, three = (
        predict("flexgen_search", {**search, "tiers_gib": tiers}).value
        for tiers in ({"ldram": 150, "rdram": 60}, {"ldram": 150, "rdram": 60, "cxl": 100})
    )
    assert three > two  # type: ignore[operator]
    training = inputs["zero_offload_ratio"]["inputs"]
    ratio = predict(
        "zero_offload_ratio",
        {**training, "a": ["ldram", "rdram", "cxl"], "metric": "optimizer_time_ratio"},
    )
    assert ratio.value > 1  # type: ignore[operator]


def test_throughput_ratio_of_a_batch_that_does_not_fit_names_need_and_offer() -> None:
    inputs = one_case_a_model()["flexgen_throughput_ratio"]["inputs"]
    small = {**inputs["a"], "tiers_gib": {"ldram": 100}}
    with pytest.raises(ValueError, match=r"a of inputs: batch \d+ needs .* GiB .* 100 GiB"):
        predict("flexgen_throughput_ratio", {**inputs, "a": small})


@pytest.mark.parametrize(("short", "answered"), [(1.015, True), (1.03, False)])
def test_a_batch_that_ran_may_miss_by_the_rounding_of_printed_sizes(
    short: float, answered: bool
) -> None:
    inputs = one_case_a_model()["flexgen_throughput_ratio"]["inputs"]
    shape = {key: inputs[key] for key in ("llm", "weight_bytes", "kv_bytes", "activation_bytes")}
    sized = {key: inputs[key] for key in ("prompt_len", "gen_len")}
    which = {key: inputs["a"][key] for key in ("batch", "kv_gpu_fraction")}
    need = predict(
        "footprint", {**shape, **sized, **which, "metric": "host_gib", "system": "none"}
    ).value
    offered = {**inputs["a"], "tiers_gib": {"ldram": need / short}}  # type: ignore[operator]
    if answered:
        assert predict("flexgen_throughput_ratio", {**inputs, "a": offered}).value > 0  # type: ignore[operator]
    else:
        with pytest.raises(ValueError, match="a of inputs: batch"):
            predict("flexgen_throughput_ratio", {**inputs, "a": offered})


@pytest.mark.parametrize("threads", [48, 96])
def test_two_hardware_threads_a_core_use_the_same_cores_however_counted(threads: int) -> None:
    inputs = {
        **one_case_a_model()["interleave_speedup"]["inputs"],
        "snc": 1, "prefetch": False, "pattern": "sequential", "access": "read",
        "lines_in_flight_per_core": 3.0, "metric": "speedup", "weights": [9, 1],
    }  # fmt: skip
    with_smt = predict("interleave_speedup", {**inputs, "threads": threads, "smt": 2}).value
    doubled = predict(
        "interleave_speedup", {**inputs, "threads": 48, "lines_in_flight_per_core": 6.0}
    ).value
    assert with_smt == doubled


def test_vllm_weights_are_half_precision_parameters_unless_given() -> None:
    inputs = one_case_a_model()["vllm_weight_offload"]["inputs"]
    counted = {**inputs, "metric": "tokens_per_s", "offload_gib": 90}
    del counted["weights_gib"]
    given = {**counted, "weights_gib": inputs["llm"]["params"] * 2 / 2**30}
    assert predict("vllm_weight_offload", counted) == predict("vllm_weight_offload", given)


def test_more_threads_than_the_socket_has_raise() -> None:
    inputs = one_case_a_model()["interleave_speedup"]["inputs"]
    with pytest.raises(ValueError, match="48 cores"):
        predict("interleave_speedup", {**inputs, "threads": 49, "smt": 1})
