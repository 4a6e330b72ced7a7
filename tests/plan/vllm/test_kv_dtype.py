"""Keys and values in fp8: half the bytes, twice the sequences, and vLLM's own flag."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.errors import ConfigError
from cxl_offload.plan.plan_file import parse_plan, plan_text
from cxl_offload.plan.vllm.plan import planned_server

from .test_plan import flag, plan_vllm, request

FP8 = ("float8_e4m3fn",)


def test_half_the_bytes_have_room_for_twice_the_sequences() -> None:
    plain = request("llama-3-70b", most_sequences=10_000)
    kept = replace(plain, kv_dtypes=FP8)
    own, small = planned_server(plain)[0], planned_server(kept)[0]
    assert small.case.kv_bytes_per_token == own.case.kv_bytes_per_token / 2
    own_plan, plan = plan_vllm(plain), plan_vllm(kept)
    assert plan.tokens_per_s > own_plan.tokens_per_s
    assert (own_plan.kv_dtype, plan.kv_dtype) == ("", "float8_e4m3fn")
    assert flag(plan, "--kv-cache-dtype") == "fp8_e4m3"
    assert "--kv-cache-dtype" not in own_plan.command
    assert any("loses precision" in note for note in plan.notes)
    assert parse_plan(plan_text(plan), file="x") == plan


def test_a_sequence_that_only_fits_in_fp8_is_planned_so() -> None:
    tight = request(
        "llama-3-8b", prompt=7000, tiers=("ldram",), limits={"ldram": 1 << 27}, gpu_usable=0.22
    )
    with pytest.raises(MemoryError, match="one sequence fit in no way"):
        plan_vllm(tight)
    assert plan_vllm(replace(tight, kv_dtypes=FP8)).kv_dtype == FP8[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [("int4", "vLLM has float8_e4m3fn and float8_e5m2"), ("fp8", "there are two"), ("x", "one of")],
)
def test_types_that_vllm_has_not_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        request("llama-3-8b", kv_dtypes=(name,))


def test_command_line_takes_the_type_for_vllm() -> None:
    words = ["plan", "inference", "--machine", "spr3-h100", "--model", "llama-3-70b", "--json"]
    words += ["--executor", "vllm", "--kv-dtype"]
    done = CliRunner().invoke(app, [*words, "float8_e5m2"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["kv_dtype"] == "float8_e5m2"
    wrong = CliRunner().invoke(app, [*words, "int4"])
    assert "vLLM has" in wrong.output + str(wrong.exception)
