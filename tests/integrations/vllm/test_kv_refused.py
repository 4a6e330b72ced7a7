"""Bad options stop the real vLLM with one line, before it loads a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.vllm.conftest import ENVIRONMENT, ROOT, RunEngine, kv_offload

WRONG = [
    (
        {"cpu_bytes_to_use": "32MiB", "polcy": "bind:0"},
        "polcy is no option; did you mean 'policy'?",
    ),
    ({"cpu_bytes_to_use": "32MiB", "policy": "bind:63"}, "node 63 has no memory that this process"),
    ({"cpu_bytes_to_use": 1 << 52}, "/dev/shm has"),
    ({}, "cpu_bytes_to_use is missing"),
]


@pytest.mark.timeout(120)
def test_configuration_of_an_engine_refuses_wrong_options_and_takes_good_ones(
    run_engine: RunEngine,
) -> None:
    right = kv_offload(cpu_bytes_to_use="32MiB", policy="bind:0")
    short = {"kv_offloading_size": 0.03125} | kv_offload(policy="bind:0")
    others = {
        "kv_transfer_config": right["kv_transfer_config"]
        | {"kv_connector_extra_config": {"spec_name": "CPUOffloadingSpec", "policy": "not ours"}}
    }
    options = [kv_offload(**extra) for extra, _ in WRONG] + [right, short, others]
    said = run_engine("refusals", {"each": options})["said"]
    for line, (_, message) in zip(said, WRONG, strict=False):
        assert message in line
        assert line.startswith("kv_connector_extra_config: ")
        assert "\n" not in line
    assert said[len(WRONG) :] == ["", "", ""]


@pytest.mark.timeout(120)
def test_command_prints_one_line_and_ends_before_a_model_is_loaded(model: str) -> None:
    config = kv_offload(cpu_bytes_to_use="32MiB", policy="bind:63")["kv_transfer_config"]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", model, "--port", "0"]
    done = subprocess.run(
        [*command, "--kv-transfer-config", json.dumps(config)],
        env=os.environ | ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "vllm: kv_connector_extra_config: policy is bind:63: node 63 has no memory"
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert "Loading weights" not in done.stdout + done.stderr


WEIGHTS = {"cxl_offload": {"weight_policy": "bind:63"}}
LINE = '--additional-config "cxl_offload": weight_policy: bind:63: node 63 has no memory'


@pytest.mark.timeout(120)
def test_command_prints_one_line_for_wrong_options_of_weights(model: str) -> None:
    command = [str(Path(sys.executable).with_name("vllm")), "serve", model, "--port", "0"]
    done = subprocess.run(
        [*command, "--cpu-offload-gb", "0.01", "--additional-config", json.dumps(WEIGHTS)],
        env=os.environ | ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"vllm: {LINE}")
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.timeout(120)
def test_weights_are_checked_when_plugins_are_loaded_before_the_arguments(model: str) -> None:
    program = (
        "import sys\n"
        "from vllm.plugins import load_general_plugins\n"
        "assert 'vllm.engine.arg_utils' not in sys.modules\n"
        "load_general_plugins()\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        f"arguments = EngineArgs(model={model!r}, cpu_offload_gb=0.01, "
        f"additional_config={WEIGHTS!r})\n"
        "try:\n"
        "    arguments.create_engine_config()\n"
        "except ValueError as error:\n"
        "    print('refused:', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert f"refused: {LINE}" in done.stdout, done.stderr
