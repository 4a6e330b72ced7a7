"""What the tests with the real vLLM share: a tiny model, and engines in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cxl_offload.memory.shared import SHARED_ROOT

Answer = dict[str, Any]
ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 30.0

# One process, no network, a KV cache of 1 GiB at most, and the plugin from wherever it is.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


@pytest.fixture(scope="session")
def vllm() -> None:
    """Skips where vLLM is not installed, or fails where the environment says that it must be."""
    if find_spec("vllm") is not None:
        return
    reason = "vLLM is not installed; `make test-vllm` runs these tests with it"
    if os.environ.get("CXL_OFFLOAD_REQUIRE_VLLM") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def no_plugin_here() -> None:
    """vLLM inside pytest's own process stays as it is; engines load the plugin in theirs."""
    if find_spec("vllm") is not None:
        import vllm.plugins

        vllm.plugins.plugins_loaded = True


@pytest.fixture(scope="session")
def model(vllm: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the tiny model."""
    from tests.integrations.vllm.tiny_model import make_model

    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return str(folder)


def kv_offload(**extra: Any) -> dict[str, Any]:
    """Engine options that offload KV blocks by this package."""
    connector = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "cxl"} | extra,
    }
    return {"kv_transfer_config": connector}


def shared_files() -> set[Path]:
    """The files of shared KV caches that have a name, also those of tests in other processes."""
    return set(SHARED_ROOT.glob("cxl_offload_kv_*"))


def left_behind(before: set[Path]) -> set[Path]:
    """What has come since ``before`` and stays.

    Processes of an engine that has ended may still remove what is theirs, and tests beside this
    one make files that lose their names when all have mapped them.
    """
    found = shared_files() - before
    end = time.monotonic() + PATIENCE_S
    while (left := {path for path in found if path.exists()}) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def start_engine(
    model: str, scenario: str, options: Answer, environment: dict[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    request = {"model": model, "scenario": scenario, "options": options}
    return subprocess.run(
        [sys.executable, "-m", "tests.integrations.vllm.engine"],
        input=json.dumps(request),
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": search} | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


RunEngine = Callable[..., Answer]


@pytest.fixture(scope="session")
def run_engine(model: str) -> RunEngine:
    """Runs a scenario of ``engine.py`` with engine options, and gives what it observed."""

    def run(
        scenario: str,
        options: Answer | None = None,
        environment: dict[str, str] | None = None,
        timeout_s: float = 240,
    ) -> Answer:
        done = start_engine(model, scenario, options or {}, environment or {}, timeout_s)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        answer: Answer = json.loads(done.stdout.splitlines()[-1])
        return answer | {"log": done.stdout + done.stderr}

    return run


@pytest.fixture(scope="session")
def plain_six(run_engine: RunEngine) -> list[list[int]]:
    """What the model answers to six prompts without offloading."""
    answers = run_engine("plain")["answers"]
    assert len({tuple(each["tokens"]) for each in answers}) == len(answers)
    return [each["tokens"] for each in answers]


@pytest.fixture(scope="session")
def plain_tokens(plain_six: list[list[int]]) -> list[list[int]]:
    """Of the first four prompts."""
    return plain_six[:4]
