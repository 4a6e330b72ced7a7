"""Plans survive their file; files that are wrong are named with their line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.plan.executor_rules import ExecutorName
from cxl_offload.plan.flexgen.plan import InferenceRequest, plan_inference
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import Plan, load_plan, parse_plan, plan_text, save_plan
from cxl_offload.plan.transformers.plan import plan_transformers
from cxl_offload.topology import load_machine

from .transformers.requests import request


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_inference(
        InferenceRequest(
            model=load_model("opt-6.7b"),
            machine=load_machine("epyc9354-cxl-a"),
            prompt=512,
            generated=32,
            model_name="opt-6.7b",
            tiers=("ldram", "cxl"),
        )
    )


def test_plan_survives_its_file(plan: Plan, tmp_path: Path) -> None:
    save_plan(plan, tmp_path / "plan.yaml")

    assert load_plan(tmp_path / "plan.yaml") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (r"gpu_bytes: \d+", "gpu_bytes: 12 GiB", "gpu_bytes: must be a whole number"),
        (r"gpu_bytes: \d+", "gpu_byte: 3", "did you mean 'gpu_bytes'"),
        (r"tokens_per_s: [\d.]+", "tokens_per_s:", "must be a number, not None"),
        (r"executor: flexgen", "executor: torch", "must be one of"),
        (r"version: 1", "version: 7", "plan version 7"),
        (r"(percent: )[\d.]+", r"percent: 250", "at most 100"),
        (r"runs: true", "runs: true\nruns: true", "appears twice"),
        (r"size: \d+", "size: 0", "batch.size: must be at least 1, not 0"),
        (r"prompt: \d+", "prompt: 0", "batch.prompt: must be at least 1, not 0"),
    ],
)
def test_wrong_plan_file_is_named_with_its_line(
    plan: Plan, old: str, new: str, message: str
) -> None:
    text = plan_text(plan)
    broken = re.sub(old, new, text, count=1)
    assert broken != text
    first = next(
        at
        for at, (a, b) in enumerate(zip(text.split("\n"), broken.split("\n"), strict=False))
        if a != b
    )

    with pytest.raises(ConfigError, match=message) as caught:
        parse_plan(broken, file="plan.yaml")

    assert caught.value.file == "plan.yaml"
    assert caught.value.line is not None
    assert abs(caught.value.line - (first + 1)) <= 4  # a list item is named by its first line


def test_missing_key_is_named(plan: Plan) -> None:
    text = re.sub(r"gpu_bytes: \d+\n", "", plan_text(plan))

    with pytest.raises(ConfigError, match="key 'gpu_bytes' is missing"):
        parse_plan(text, file="plan.yaml")


def test_homes_of_a_kind_sum_to_a_whole(plan: Plan) -> None:
    with pytest.raises(ValueError, match=r"homes of .* sum to"):
        replace(plan, homes=plan.homes[1:] + plan.homes[-1:])


def test_text_says_which_of_homes_and_policies_runs(plan: Plan) -> None:
    """Only where there are policies."""
    assert "policies is what runs" in plan_text(plan_transformers(request()))
    assert "policies is what runs" not in plan_text(plan)


def test_plan_that_does_not_run_says_why(plan: Plan) -> None:
    with pytest.raises(ValueError, match="reason in 'advice'"):
        replace(plan, runs=False)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (r"tokens_per_s: .*", "tokens_per_s: .nan", "must be a finite number, not nan"),
        (r"tokens_per_s: .*", "tokens_per_s: .inf", "must be a finite number, not inf"),
        (r"tokens_per_s: .*", "tokens_per_s: -1.0", "tokens_per_s: must be at least 0, not -1.0"),
        (r"kv_dtype: .*", "kv_dtype: int4", "kv_dtype 'int4': flexgen takes none"),
        (r"kind: inference", "kind: training", "kind 'training': flexgen takes inference"),
        (r"  where: \w+", "  where: attic", "where 'attic': gpu, or one of ldram, rdram"),
        (r"on_cpu: .*", "on_cpu: [foo]", "on_cpu 'foo': it is a kind that has a policy"),
    ],
)
def test_plan_that_cannot_be_is_refused_when_it_is_read(
    plan: Plan, old: str, new: str, message: str
) -> None:
    text = re.sub(rf"^{old}$", new, plan_text(plan), count=1, flags=re.MULTILINE)
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_plan(text, file="plan.yaml")


@pytest.mark.parametrize(
    ("executor", "fields", "takes"),
    [
        ("transformers", {"kv_dtype": "int3"}, "float8_e4m3fn or float8_e5m2 or int4"),
        ("vllm", {"kv_dtype": "int4"}, "float8_e4m3fn or float8_e5m2"),
        ("vllm", {"state_dtype": "uint8"}, "none"),
        ("transformers", {"checkpointing": True}, "none"),
        ("deepspeed", {"kind": "training", "kv_dtype": "int4"}, "none"),
        ("deepspeed", {"kind": "training", "state_dtype": "int4"}, "bfloat16 or uint8"),
        ("deepspeed", {}, "training"),
    ],
)
def test_plan_says_for_each_executor_only_what_its_room_allows(
    plan: Plan, executor: ExecutorName, fields: dict[str, Any], takes: str
) -> None:
    *_, name = fields if fields else ("kind",)
    said = fields.get(name, plan.kind)
    with pytest.raises(ValueError, match=re.escape(f"{name} {said!r}: {executor} takes {takes}")):
        replace(plan, executor=executor, **fields)


def test_plan_says_what_the_room_of_its_executor_allows(plan: Plan) -> None:
    kept = replace(plan, executor="vllm", kv_dtype="float8_e5m2")
    assert parse_plan(plan_text(kept), file="plan.yaml") == kept
    training = replace(plan, executor="deepspeed", kind="training", checkpointing=True)
    assert parse_plan(plan_text(training), file="plan.yaml") == training


@pytest.mark.parametrize("threads", [{0: 0}, {9: -5}, {0: 10**9}])
def test_threads_that_no_machine_has_are_refused_when_a_plan_is_read(
    plan: Plan, threads: dict[int, int]
) -> None:
    text = re.sub(r"^threads:.*\n(?:[ -].*\n)*", "", plan_text(plan), flags=re.MULTILINE)
    with pytest.raises(
        ConfigError, match=r"^plan\.yaml:\d+: threads\.\d: must be at (least 1|most)"
    ):
        parse_plan(f"{text}threads: {threads}\n", file="plan.yaml")


def test_folder_that_names_a_model_cannot_write_to_a_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "my\x1b[31m\nopt"
    folder.mkdir()
    config = {"model_type": "opt", "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "vocab_size": 100, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(folder).name == r"my\x1b[31m\nopt"
