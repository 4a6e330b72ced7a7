"""Inference plans: whether CXL is used, who can run them, and what is refused."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.errors import ConfigError
from cxl_offload.plan.flexgen.plan import InferenceRequest, plan_inference
from cxl_offload.plan.hardware import hardware_of
from cxl_offload.plan.known_errors import FLEXGEN_ERROR, VLLM_ERROR
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import load_plan
from cxl_offload.topology import load_machine
from cxl_offload.validation import PLAN_CASES, PUBLISHED_CASES
from cxl_offload.validation.casefile import load_cases
from cxl_offload.validation.report import validate


def request(
    model: str = "opt-30b", machine: str = "epyc9354-cxl-a", **extra: Any
) -> InferenceRequest:
    return InferenceRequest(
        model=load_model(model),
        machine=load_machine(machine),
        prompt=extra.pop("prompt", 512),
        generated=extra.pop("generated", 32),
        model_name=model,
        **extra,
    )


def test_cxl_is_used_where_it_allows_more_sequences() -> None:
    plan = plan_inference(request("opt-66b", tiers=("ldram", "cxl")))

    assert plan.cxl.used
    assert plan.cxl.gain is not None
    assert plan.cxl.gain > 0.03
    assert "sequences at once" in plan.cxl.reason
    assert plan.node_bytes[2] > 0


def test_cxl_is_left_alone_where_dram_is_enough() -> None:
    plan = plan_inference(request("opt-6.7b"))

    assert not plan.cxl.used
    assert "adds nothing" in plan.cxl.reason or "below the margin" in plan.cxl.reason
    assert 2 not in plan.node_bytes or plan.node_bytes[2] == 0
    assert "cxl" not in " ".join(plan.command).replace("epyc9354-cxl-a", "").replace(
        "cxl-offload", ""
    )


def test_margin_decides_about_small_gains() -> None:
    eager = plan_inference(request("opt-66b", tiers=("ldram", "cxl"), cxl_margin=0.0))
    never = plan_inference(request("opt-66b", tiers=("ldram", "cxl"), cxl_margin=100.0))

    assert eager.cxl.used
    assert not never.cxl.used
    assert never.cxl.gain == pytest.approx(eager.cxl.gain)
    assert "below the margin of 10000.0%" in never.cxl.reason


def test_cxl_is_kept_where_nothing_runs_without() -> None:
    small = {"ldram": 100 << 30}
    plan = plan_inference(request("opt-66b", tiers=("ldram", "cxl"), limits=small, cxl_margin=9.0))

    assert plan.cxl.used
    assert plan.cxl.gain is None
    assert plan.cxl.reason == "without CXL memory not one batch fits"


def test_other_models_are_advice_only() -> None:
    plan = plan_inference(request("llama-2-7b"))

    assert not plan.runs
    assert "OPT and Galactica only" in plan.advice


def test_post_norm_opt_is_advice_only() -> None:
    assert "layer norm comes after" in plan_inference(request("opt-350m")).advice


def test_limits_are_kept() -> None:
    plan = plan_inference(request("opt-30b", limits={"ldram": 20 << 30, "cxl": 10 << 30}))

    assert plan.node_bytes[0] <= 20 << 30
    assert plan.node_bytes.get(2, 0) <= 10 << 30


def test_drive_is_used_only_where_it_may_be() -> None:
    with_drive = plan_inference(request("opt-175b"))
    without = request("opt-175b", tiers=("ldram", "rdram", "cxl"))

    assert with_drive.drive_bytes > 0
    assert plan_inference(without).drive_bytes == 0


def test_drive_is_not_read_for_every_token_while_cxl_idles() -> None:
    """The command that opens docs/plan.md: CXL memory was left alone beside a busy drive."""
    plan = plan_inference(request("opt-66b"))

    assert plan.drive_bytes == 0 or plan.cxl.used
    assert "the drive adds" in plan.cxl.reason or "the drive brings" in plan.cxl.reason


@pytest.mark.parametrize("tier", ["rdram", "cxl"])
def test_node_with_hardly_any_room_takes_nothing_from_the_others(tier: str) -> None:
    other = "cxl" if tier == "rdram" else "rdram"
    small = plan_inference(
        request("opt-30b", tiers=("ldram", "rdram", "cxl"), limits={tier: 1 << 20})
    )
    without = plan_inference(request("opt-30b", tiers=("ldram", other)))
    assert small.tokens_per_s == pytest.approx(without.tokens_per_s, rel=1e-5)


def test_page_cache_counts_as_room() -> None:
    machine = load_machine("epyc9354-cxl-a")
    full, cached = (
        replace(
            machine,
            nodes=tuple(
                replace(node, free_bytes=1 << 30, page_cache_bytes=cache) for node in machine.nodes
            ),
        )
        for cache in (0, 100 << 30)
    )
    rooms = [
        [node.usable_bytes for node in hardware_of(each).nodes] for each in (full, cached, machine)
    ]
    assert max(rooms[0]) < 1 << 30
    assert 90 << 30 < min(rooms[1]) <= max(rooms[1]) < max(rooms[2])


def test_prices_are_what_one_unit_more_brings() -> None:
    wanted = request("opt-30b", tiers=("ldram",), limits={"ldram": 100 << 30}, host_usable=1.0)
    plan = plan_inference(wanted)
    more = plan_inference(replace(wanted, limits={"ldram": 101 << 30}))
    (price,) = [each for each in plan.prices if each.what == "ldram capacity"]
    assert price.gain_tokens_per_s == pytest.approx(
        more.tokens_per_s - plan.tokens_per_s, rel=1e-3, abs=1e-4
    )


def test_nothing_fits_is_said_with_numbers() -> None:
    with pytest.raises(MemoryError, match=r"weights alone need 326 GiB, .* are missing; usable"):
        plan_inference(request("opt-175b", tiers=("ldram",)))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"tiers": ("hbm",)}, "tier hbm: epyc9354-cxl-a has no such tier"),
        ({"limits": {"hbm": 1}}, "limit of hbm"),
        ({"limits": {"cxl": 1 << 50}}, "limit of cxl: 1.049e\\+06 GiB, but it has 128 GiB"),
        ({"most_batches": 0}, "at most 0 batches"),
        ({"cxl_margin": -0.1}, "margin -0.1"),
        ({"host_usable": 1.5}, "usable share of host memory 1.5"),
        ({"machine": "zen4-1"}, "zen4-1 has no GPU"),
        ({"machine": "zen4-2-mi300a"}, "GPU MI300A-0 and the CPUs share one memory"),
    ],
)
def test_impossible_requests_are_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_inference(request(**extra))


@pytest.mark.parametrize(("prompt", "generated"), [(2000, 100), (0, 4), (4, 1)])
def test_lengths_the_model_cannot_have_are_refused(prompt: int, generated: int) -> None:
    with pytest.raises(ValueError, match=r"positions|at least"):
        plan_inference(request(prompt=prompt, generated=generated))


def test_encoder_is_refused() -> None:
    with pytest.raises(ValueError, match="encoder"):
        plan_inference(request("bert-base-uncased", prompt=128, generated=8))


def test_predicted_errors_are_those_of_validate() -> None:
    published = validate(load_cases(PUBLISHED_CASES))
    plans = validate(load_cases(PLAN_CASES))
    flexgen = [each for each in plans if each.case.inputs.get("executor") == "flexgen-stock"]
    flexgen = [each for each in flexgen if each.case.inputs["metric"] == "tokens_per_s"]
    offloaded = [each for each in published if each.case.group == "vllm_weight_offload"]
    speeds = [each for each in offloaded if each.case.inputs.get("metric") == "tokens_per_s"]
    speeds += [each for each in plans if each.case.inputs.get("executor") == "vllm"]
    for results, stated in ((flexgen, FLEXGEN_ERROR), (speeds, VLLM_ERROR)):
        errors = sorted(each.error for each in results if each.error is not None)
        assert len(errors) == stated.cases
        assert statistics.median(errors) == pytest.approx(stated.median, abs=5e-4)
        assert errors[-1] == pytest.approx(stated.worst, abs=5e-4)


def test_command_line_writes_a_plan_that_shows_again(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    arguments = ["plan", "inference", "--model", "opt-6.7b", "--machine", "epyc9354-cxl-a"]
    flags = ["--executor", "flexgen", "--output", str(file)]
    made = CliRunner().invoke(app, [*arguments, *flags])
    shown = CliRunner().invoke(app, ["plan", "show", str(file), "--json"])

    assert made.exit_code == 0, made.output
    assert f"cxl-offload flexgen --plan {file} --model opt-6.7b" in made.output.replace("\n", "")
    assert "(predicted)" in made.output
    plan = load_plan(file)
    assert json.loads(shown.output)["tokens_per_s"] == plan.tokens_per_s


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--limit", "cxl=64"], "'64' is not a quantity"),
        (["--limit", "cxl"], "expected TIER=SIZE"),
        (["--model", "nothing"], "no such folder or file"),
        (["--prompt-len", "4096"], "positions"),
    ],
)
def test_command_line_names_what_is_wrong(extra: list[str], message: str) -> None:
    arguments = ["plan", "inference", "--model", "opt-6.7b", "--machine", "epyc9354-cxl-a", *extra]

    made = CliRunner().invoke(app, arguments)

    assert made.exit_code == 2
    assert message in made.output
    assert "Traceback" not in made.output


def test_fast_machine_needs_no_host(tmp_path: Path) -> None:
    plan = plan_inference(replace(request("opt-1.3b"), machine=load_machine("spr3-h100")))

    assert sum(plan.node_bytes.values()) == 0
    assert {home.where for home in plan.homes} == {"gpu"}


def test_interleaving_can_be_forced_and_forbidden() -> None:
    forced = plan_inference(request("opt-30b", interleave={"kv": "always", "weights": "always"}))
    plain = plan_inference(request("opt-30b", interleave={"kv": "never", "weights": "never"}))
    free = plan_inference(request("opt-30b"))

    assert {
        home.policy[:9] for home in forced.homes if home.policy and home.kind in ("kv", "weights")
    } == {"weighted:"}
    assert "weighted:" not in " ".join(plain.command)
    assert free.tokens_per_s >= max(forced.tokens_per_s, plain.tokens_per_s) * (1 - 2e-6)


def test_objects_are_given_policies_on_the_command_line() -> None:
    arguments = ["plan", "objects", "--machine", "epyc9354-cxl-a", "--json"]
    arguments += ["--object", "kv=60GiB", "--object", "exp_avg=30GiB", "--object", "act=1GiB"]
    made = CliRunner().invoke(app, arguments)

    assert made.exit_code == 0, made.output
    assert json.loads(made.output)["version"] == 1
    policies = {each["name"]: each["policy"] for each in json.loads(made.output)["objects"]}
    assert policies["kv"].startswith("weighted:ldram=")
    assert policies["exp_avg"] == policies["act"] == "preferred:ldram,cxl"
    wrong = CliRunner().invoke(app, [*arguments, "--object", "x=1GiB,2GiB"])
    assert "expected NAME=SIZE or" in wrong.output


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--object", "x=1GiB"], "--object kv: READ,WRITTEN are compared, so all objects need"),
        (["--trace", "t.json"], "--object kv: --trace says what was read and written; leave"),
    ],
)
def test_accesses_of_an_object_that_would_not_count_are_refused(more: list[str], said: str) -> None:
    """They were left out in silence, and the policy was one of the kind alone."""
    arguments = ["plan", "objects", "--machine", "epyc9354-cxl-a"]
    arguments += ["--object", "kv=60GiB,1TiB,1GiB"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    refused = CliRunner().invoke(app, [*arguments, *more])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert said in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_missing_number_is_named_with_the_line_of_the_machine_file(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "configs/machines/epyc9354-cxl-a.yaml").read_text()
    without = "".join(
        line for line in text.splitlines(keepends=True) if "memory_bandwidth:" not in line
    )
    file = tmp_path / "mine.yaml"
    file.write_text(without.replace("name: epyc9354-cxl-a", "name: mine"))
    line = 1 + next(at for at, each in enumerate(without.splitlines()) if each == "gpus:")
    arguments = ["plan", "inference", "--model", "opt-6.7b", "--executor", "flexgen", "--machine"]

    made = CliRunner().invoke(app, [*arguments, str(file)])
    none = CliRunner().invoke(app, [*arguments, "zen4-1"])

    assert f"mine.yaml:{line}: machine mine: GPU A10 has no peak rates" in made.output
    assert "zen4-1.yaml:" in none.output
    assert "the file has no 'gpus'" in none.output


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("value: 128 GiB", "value: 128", "'128' is not a quantity"),
        ("value: 128 GiB", "value: 0 GiB", "must be more than 0"),
        ("capacity: &dram_offered", "capacit: &dram_offered", "did you mean 'capacity'"),
    ],
)
def test_wrong_machine_file_is_named_with_its_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    text = (Path(__file__).parents[3] / "configs/machines/epyc9354-cxl-a.yaml").read_text()
    file = tmp_path / "epyc9354-cxl-a.yaml"
    file.write_text(text.replace(old, new, 1))
    line = 1 + next(at for at, each in enumerate(text.splitlines()) if old in each)
    arguments = ["plan", "inference", "--model", "opt-6.7b", "--machine", str(file)]

    made = CliRunner().invoke(app, arguments)

    assert made.exit_code == 2
    assert f"{file.name}:{line}:" in made.output.replace("\n", "")
    assert message in made.output
