"""Flags for a plan, read by vLLM's own parser, and a plan that runs as it stands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from cxl_offload.integrations.vllm.weight_options import read_weight_options
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.vllm.flags import Shape, flags_of_plan, offload_flags
from cxl_offload.plan.vllm.plan import VllmRequest, plan_vllm
from cxl_offload.topology import load_machine

from .weights_run import make_model
from .weights_start import plugin_environment, result, run_once

GIB = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


def parsed(model: Path, flags: Sequence[str]) -> EngineArgs:
    parser = make_arg_parser(FlexibleArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args(["--model", str(model), *flags]))


@pytest.mark.parametrize("shape", ["short", "long"])
def test_flags_mean_the_same_to_vllm_in_both_shapes(model: Path, shape: Shape) -> None:
    flags = offload_flags({"2": GIB}, {"0": 4 * GIB}, shape=shape)
    arguments = parsed(model, [*flags, "--skip-tokenizer-init"])
    assert GIB < arguments.cpu_offload_gb * GIB < 1.01 * GIB
    options = read_weight_options(arguments.additional_config, load_machine("epyc9354-cxl-a"))
    assert options is not None
    assert options.policy == "bind:2"
    arguments.cpu_offload_gb, arguments.additional_config = 0.0, {}  # of another machine than this
    config: Any = arguments.create_engine_config().kv_transfer_config
    assert (config.kv_connector, config.kv_role) == ("OffloadingConnector", "kv_both")
    extra = config.kv_connector_extra_config
    assert extra["cpu_bytes_to_use"] == 4 * GIB
    assert extra["policy"] == "bind:0"
    assert extra["spec_name"] in ("cxl", "CxlOffloadingSpec")


def test_plan_runs_as_it_stands(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    machine = load_machine("spr3-h100")
    gpu_bytes = machine.gpus[0].memory_bytes
    assert gpu_bytes is not None
    plan = plan_vllm(
        VllmRequest(
            model=load_model(str(model)),
            machine=machine,
            prompt=100,
            generated=16,
            model_name=str(model),
            tiers=("ldram",),
            gpu_reserved_bytes=int(gpu_bytes * 0.9) - 900_000,  # the model and hardly any KV fit
        )
    )
    assert plan.runs
    assert plan.of("weights")["ldram"] > 0
    # as the plan says it, but for what is a GPU's: there is none here
    at = plan.command.index("--gpu-memory-utilization")
    command = [*plan.command[:at], *plan.command[at + 2 :]]
    assert command[:3] == ["vllm", "serve", str(model)]
    assert tuple(command[-4:]) == flags_of_plan(plan)
    environment = plugin_environment(tmp_path_factory.mktemp("plugin"))
    placed = result(run_once(environment, model, {"flags": command[3:]}))
    plain = result(run_once(environment, model, {"flags": command[3:-4]}))
    assert placed["tokens"] == plain["tokens"]
    assert placed["report"]["asked_bytes"] >= plan.of("weights")["ldram"]
    # the layers' matrices were taken; some processors' kernels then pack them elsewhere
    matrices = placed["report"]["kinds"].get("mlp", 0) + placed["report"]["repacked_bytes"]
    assert matrices > 0
    assert plain["offloader"] == "NoopOffloader"
    assert json.loads(command[-1]) == {"cxl_offload": {"weight_policy": "bind:ldram"}}
