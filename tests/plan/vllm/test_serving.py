"""Time to the first token and between later ones, and targets that limit sequences at once."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.errors import ConfigError
from cxl_offload.plan.fleet.arrivals import Arrival
from cxl_offload.plan.fleet.server import ServerRates, serve
from cxl_offload.plan.plan_file import Plan, Serving, parse_plan, plan_text
from cxl_offload.plan.vllm.plan import planned_server
from cxl_offload.plan.vllm.serving import TokenTargets
from cxl_offload.plan.vllm.steps import PromptWork

from .test_plan import flag, plan_vllm, request

RUN = CliRunner()


def seen(plan: Plan) -> Serving:
    assert plan.serving is not None
    return plan.serving


@pytest.mark.parametrize("model", ["llama-3-8b", "llama-3-70b"])
def test_plan_says_what_requests_of_a_busy_server_see(model: str) -> None:
    """Against the server of fleets, under requests that come as fast as it can take them."""
    wanted = request(model, most_sequences=32)
    plan = plan_vllm(wanted)
    steps, hardware = planned_server(wanted)
    flops = wanted.model.forward_flops(tokens=300, context=150)
    work = PromptWork(flops / hardware.gpu.products_flops_per_s, 300, steps.case.request_s)
    apart = 100 / plan.tokens_per_s * 1.02  # 100 tokens an answer
    arrivals = [Arrival(0.0 if at < 32 else at * apart, 300, 100) for at in range(600)]
    served = serve(ServerRates(steps, lambda _: work), arrivals)[300:]
    mean = sum(each.per_token for each in served) / len(served)
    assert seen(plan).per_token_s == pytest.approx(mean, rel=0.1)
    first = sorted(each.first_token for each in served)[len(served) // 10]
    assert first <= seen(plan).first_token_s * 1.1  # who waits for no end sees that or less
    assert seen(plan).alone_s == pytest.approx(steps.alone(work))
    assert seen(plan).alone_s < seen(plan).first_token_s


def test_weights_off_the_gpu_are_in_the_first_token() -> None:
    plan = plan_vllm(request("llama-3-70b"))
    link = request().hardware().link_bytes_per_s
    assert seen(plan).alone_s > sum(plan.node_bytes.values()) / link > 1.0


@pytest.mark.parametrize(
    "targets",
    [
        TokenTargets(per_token=0.02),
        TokenTargets(first_token=0.05),
        TokenTargets(first_token=0.2, per_token=0.015),
    ],
)
def test_targets_take_the_most_sequences_that_meet_them(targets: TokenTargets) -> None:
    base = request("llama-3-8b", cxl_margin=0.0)
    plan = plan_vllm(replace(base, targets=targets))
    most = int(flag(plan, "--max-num-seqs"))
    assert 1 <= most < 256

    def meets(count: int) -> bool:
        found = seen(plan_vllm(replace(base, most_sequences=count)))
        return found.first_token_s <= targets.first_token and found.per_token_s <= targets.per_token

    assert meets(most)
    assert not meets(most + 1)
    assert plan.tokens_per_s < plan_vllm(base).tokens_per_s
    assert plan.tokens_per_s == pytest.approx(
        plan_vllm(replace(base, most_sequences=most)).tokens_per_s
    )


def test_targets_out_of_reach_are_named() -> None:
    with pytest.raises(MemoryError, match=r"gives later ones within 0.001 s \(predicted\)"):
        plan_vllm(request("llama-3-8b", targets=TokenTargets(per_token=1e-3)))
    with pytest.raises(ConfigError, match="above 0 is needed"):
        TokenTargets(first_token=0.0)
    with pytest.raises(ConfigError, match="above 0 is needed"):
        TokenTargets(per_token=float("nan"))


def test_command_line_takes_targets_and_prints_what_requests_see() -> None:
    words = ["plan", "inference", "--machine", "spr3-h100", "--model", "llama-3-8b"]
    words += ["--gen-len", "128"]

    def made(*more: str) -> dict[str, Any]:
        done = RUN.invoke(app, [*words, *more, "--json"])
        assert done.exit_code == 0, done.output
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    free, held = made("--executor", "vllm"), made("--per-token", "20ms", "--ttft", "1s")
    assert held["executor"] == "vllm"
    assert held["serving"]["per_token_s"] <= 0.02 < free["serving"]["per_token_s"]
    printed = RUN.invoke(app, [*words, "--ttft", "1s"], env={"COLUMNS": "200"}).output
    assert "A request sees its first token after" in printed
    wrong = RUN.invoke(app, [*words, "--ttft", "soon"])
    assert "--ttft" in wrong.output + str(wrong.exception)
    other = RUN.invoke(app, [*words, "--executor", "flexgen", "--ttft", "1s"])
    assert other.exit_code == 2


def test_plan_files_keep_what_requests_see_and_older_ones_are_read() -> None:
    plan = plan_vllm(request("llama-3-8b"))
    text = plan_text(plan)
    assert parse_plan(text, file="x") == plan
    begin = text.index("serving:")
    end = text.index("per_token_s", begin)
    older = text[:begin] + text[text.index("\n", end) + 1 :]
    assert parse_plan(older, file="x") == replace(plan, serving=None)
