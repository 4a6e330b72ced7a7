"""vLLM plans: the number of layers against brute force, flags, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
import shlex
from typing import Any

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.errors import ConfigError
from cxl_offload.memory import Weighted, parse_policy
from cxl_offload.plan.gpu import LAYER_S, REQUEST_S, SEQUENCE_S
from cxl_offload.plan.hardware import hardware_of
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import Plan, parse_plan, plan_text
from cxl_offload.plan.vllm.layers import copies_bytes_per_s, layer_bytes
from cxl_offload.plan.vllm.offload import WeightOffload, kv_room_bytes, tokens_per_s
from cxl_offload.plan.vllm.plan import VllmRequest, plan_vllm
from cxl_offload.topology import load_machine

GIB = 1 << 30


def request(model: str = "llama-3-70b", machine: str = "spr3-h100", **extra: Any) -> VllmRequest:
    return VllmRequest(
        model=load_model(model),
        machine=load_machine(machine),
        prompt=extra.pop("prompt", 300),
        generated=extra.pop("generated", 100),
        model_name=model,
        **extra,
    )


def best_by_hand(wanted: VllmRequest) -> float:
    """Every split of layers over all nodes that have room."""
    hardware = hardware_of(wanted.machine, tiers=wanted.tiers, limits=wanted.limits)
    model, each = wanted.model, layer_bytes(wanted.model)
    best = 0.0
    most = [int(tier.usable_bytes // each) for tier in hardware.nodes]
    for layers in itertools.product(*(range(min(top, model.layers) + 1) for top in most)):
        if sum(layers) > model.layers:
            continue
        case = WeightOffload(
            params=model.parameters,
            weight_bytes=2 * model.parameters,
            kv_bytes_per_token=model.kv_bytes_per_token(),
            gpu_memory_bytes=wanted.machine.gpus[0].memory_bytes or 0,
            usable_fraction=wanted.gpu_usable,
            gpu_reserved_bytes=wanted.gpu_reserved_bytes,
            gpu=hardware.gpu,
            mean_tokens_per_sequence=wanted.prompt + wanted.generated / 2,
            max_running_sequences=wanted.most_sequences,
            link_bytes_per_s=copies_bytes_per_s(hardware, layers),
            flops_per_token=model.forward_flops(
                tokens=1, context=wanted.prompt + wanted.generated / 2
            ),
            prefill_flops=model.forward_flops(tokens=wanted.prompt, context=wanted.prompt / 2),
            tokens_per_sequence=wanted.generated,
            table_bytes=2 * model.vocab * model.hidden,
            step_s=model.layers * LAYER_S,
            sequence_s=SEQUENCE_S,
            request_s=REQUEST_S,
            most_by_prompts=8192 / (1 + wanted.prompt / wanted.generated),
        )
        whole = case.kv_bytes_per_token * (wanted.prompt + wanted.generated)
        if kv_room_bytes(case, sum(layers) * each) >= whole:
            best = max(best, tokens_per_s(case, sum(layers) * each))
    return best


@pytest.mark.slow(reason="tries every placement")
@pytest.mark.parametrize(
    ("model", "machine", "limits"),
    [
        ("llama-3-70b", "spr3-h100", {"ldram": 40 * GIB, "rdram": 20 * GIB}),
        ("llama-2-7b", "epyc9354-cxl-a", {}),
        ("llama-3-8b", "epyc9354-cxl-a", {"ldram": 4 * GIB, "rdram": 3 * GIB}),
    ],
)
def test_layers_off_the_gpu_are_optimal(model: str, machine: str, limits: dict[str, int]) -> None:
    wanted = request(model, machine, limits=limits, cxl_margin=0.0)

    assert plan_vllm(wanted).tokens_per_s == pytest.approx(best_by_hand(wanted), rel=1e-9)


def test_layers_make_up_the_model() -> None:
    for name in ("llama-3-70b", "opt-30b", "mixtral-8x7b", "gpt2-xl"):
        model = load_model(name)
        outside = 2 * model.parameters - model.layers * layer_bytes(model)
        tables = sum(t.elements for t in model.tensors() if t.kind in ("embedding", "head"))
        assert outside == 2 * (
            tables + model.hidden * (2 if model.family in ("opt", "gpt2") else 1)
        )


def flag(plan: Plan, name: str) -> str:
    return plan.command[plan.command.index(name) + 1]


def test_prompts_are_computed_too() -> None:
    """No rate is above what the GPU's arithmetic allows for prompts and answers together."""
    plan = plan_vllm(request("qwen2-7b", "epyc9354-cxl-a", prompt=2000, generated=20))
    model, gpu = load_model("qwen2-7b"), load_machine("epyc9354-cxl-a").gpus[0]
    requests_per_s = plan.tokens_per_s / 20
    flops = model.forward_flops(tokens=2000, context=1000)
    flops += 20 * model.forward_flops(tokens=1, context=2010)
    assert requests_per_s * flops <= (gpu.peak_flops_per_s or 0)
    assert plan.phases[0].bottleneck == "prefill of new requests"


def test_server_takes_longer_requests_than_planned_where_kv_has_room() -> None:
    plan = plan_vllm(request("llama-3-8b", prompt=100, generated=20))
    assert int(flag(plan, "--max-model-len")) == load_model("llama-3-8b").positions
    tight = plan_vllm(request("llama-3-70b"))
    longest = int(flag(tight, "--max-model-len"))
    assert 400 <= longest <= load_model("llama-3-70b").positions


def test_flags_say_the_bytes_and_the_node() -> None:
    plan = plan_vllm(request())

    assert plan.runs
    assert plan.command[:3] == ("vllm", "serve", "llama-3-70b")
    planned = plan.of("weights")["ldram"]
    assert planned < float(flag(plan, "--cpu-offload-gb")) * GIB < planned * 1.002
    config = json.loads(flag(plan, "--additional-config"))
    assert config == {"cxl_offload": {"weight_policy": "bind:ldram"}}
    assert parse_plan(plan_text(plan), file="x") == plan


def test_layers_on_several_nodes_run_too() -> None:
    plan = plan_vllm(request(limits={"ldram": 40 * GIB, "rdram": 20 * GIB}))

    assert plan.cxl.used
    assert plan.runs
    assert plan.node_bytes[0] <= 40 * GIB
    config = json.loads(flag(plan, "--additional-config"))
    policy = parse_policy(config["cxl_offload"]["weight_policy"], load_machine("spr3-h100"))
    assert isinstance(policy, Weighted)
    layers = {
        node: nbytes // layer_bytes(load_model("llama-3-70b"))
        for node, nbytes in plan.node_bytes.items()
        if nbytes
    }
    unit = math.gcd(*layers.values())
    assert dict(policy.weights) == {node: count // unit for node, count in layers.items()}


def test_evicted_kv_is_placed_and_counted() -> None:
    plan = plan_vllm(request(kv_host_bytes=100 * GIB, limits={"ldram": 150 * GIB}))

    assert sum(plan.of("kv evicted").values()) == 100 * GIB
    assert flag(plan, "--kv-offloading-size") == "100"
    assert sum(plan.node_bytes.values()) == 100 * GIB + plan.of("weights")["ldram"]


def test_model_that_fits_the_gpu_stays_there() -> None:
    plan = plan_vllm(request("llama-2-7b", prompt=100, generated=20))

    assert plan.of("weights") == {"gpu": 2 * load_model("llama-2-7b").parameters}
    assert "--cpu-offload-gb" not in plan.command
    assert plan.command[0] == "vllm"


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        ({"tiers": ("ldram", "nvme")}, ConfigError, "no drive"),
        ({"machine": "zen4-1"}, ConfigError, "no GPU"),
        ({"model": "bert-base-uncased"}, ValueError, "encoder"),
        ({"prompt": 9000}, ValueError, "positions"),
        ({"most_sequences": 0}, ConfigError, "at least 1"),
        ({"cxl_margin": math.nan}, ConfigError, "margin nan"),
        ({"limits": {"ldram": GIB, "rdram": GIB, "cxl": GIB}}, MemoryError, "alone need 1"),
        (
            {
                "model": "llama-3-8b",
                "prompt": 8000,
                "gpu_usable": 0.22,
                "tiers": ("ldram",),
                "limits": {"ldram": GIB // 10},
            },
            MemoryError,
            "one sequence fit in no way; GPU 17",
        ),
        ({"kv_host_bytes": 1 << 60}, MemoryError, r"--kv-host .*iB: usable are ldram .*give less"),
    ],
)
def test_impossible_requests_are_refused(
    extra: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan_vllm(request(**extra))


def test_command_line_takes_vllm_where_one_of_its_options_is_given() -> None:
    arguments = ["plan", "inference", "--machine", "spr3-h100", "--model", "llama-3-70b"]
    arguments += ["--max-num-seqs", "64"]
    made = CliRunner().invoke(app, arguments)

    assert made.exit_code == 0, made.output
    command = shlex.split(made.output.strip().splitlines()[-1])
    assert command[:3] == ["vllm", "serve", "llama-3-70b"]
    wrong = CliRunner().invoke(app, [*arguments, "--executor", "torch"])
    assert "must be auto, flexgen-stock, flexgen, transformers or vllm" in wrong.output


@pytest.mark.slow(reason="plans with every executor")
def test_auto_takes_the_faster_executor_and_names_the_other() -> None:
    arguments = ["plan", "inference", "--machine", "spr3-h100", "--model", "opt-13b", "--json"]
    plans = {
        executor: json.loads(CliRunner().invoke(app, [*arguments, "--executor", executor]).stdout)
        for executor in ("auto", "flexgen", "transformers", "vllm")
    }
    speeds = {name: plan["tokens_per_s"] for name, plan in plans.items()}
    found = plans["auto"]
    assert found["tokens_per_s"] == max(speeds[name] for name in speeds.keys() - {"auto"})
    for other in speeds.keys() - {"auto", found["executor"]}:
        assert any(note.startswith(f"{other}: ") for note in found["notes"])


@pytest.mark.parametrize(
    ("executor", "option"), [("vllm", "--max-batches=2"), ("flexgen", "--max-num-seqs=2")]
)
def test_options_of_the_other_executor_are_refused(executor: str, option: str) -> None:
    arguments = ["plan", "inference", "--machine", "spr3-h100", "--model", "opt-13b", option]
    done = CliRunner().invoke(app, [*arguments, "--executor", executor])
    assert done.exit_code == 2
    assert option.partition("=")[0] in done.output
