"""The worker's results; DeepSpeed itself is never loaded into the process of the tests."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cxl_offload.plan.plan_file import Plan, save_plan

ROOT = Path(__file__).parents[3]
WORKER = "tests.integrations.deepspeed.worker"
REQUIRED = os.environ.get("CXL_OFFLOAD_REQUIRE_DEEPSPEED", "") == "1"

Job = dict[str, Any]
Train = Callable[..., list[Any]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(processes: int) -> dict[str, str]:
    """One thread a process, so that sums are in the same order; gloo over the loopback."""
    made = dict(os.environ, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    made["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    made["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    made["PYTHONWARNINGS"] = "ignore"
    if processes == 1:
        made |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        made |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return made


def run_worker(
    folder: Path, jobs: list[Job], *, processes: int = 1, extra: dict[str, str] | None = None
) -> list[Any]:
    """Results of every job, of rank 0; with several processes a list of all ranks' results."""
    asked, answered = folder / "jobs.json", folder / "results.json"
    asked.write_text(json.dumps(jobs))
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
        command += [f"--master-port={free_port()}"]
    command += ["-m", WORKER, str(asked), str(answered)]
    # The first run on a machine compiles DeepSpeed's CPU kernels, which takes minutes.
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(processes) | (extra or {}),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    ranks = [json.loads(Path(f"{answered}.{rank}").read_text()) for rank in range(processes)]
    return ranks[0] if processes == 1 else [list(each) for each in zip(*ranks, strict=True)]


@pytest.fixture(scope="session")
def deepspeed_there() -> None:
    """Skips, or fails where it is required, without DeepSpeed."""
    missing = [name for name in ("torch", "deepspeed") if importlib.util.find_spec(name) is None]
    if missing and REQUIRED:
        pytest.fail(f"CXL_OFFLOAD_REQUIRE_DEEPSPEED=1, but {', '.join(missing)} is not installed")
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed; make test-deepspeed installs it")


def run_plan(
    folder: Path, plan: Plan, script: str, extra: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """:func:`run_folder`, of a folder that gets the plan and its ``train.py``.

    DeepSpeed's launcher has a port of its own for each: by default all would have the same one.
    """
    launcher, *words = plan.command
    plan = replace(plan, command=(launcher, f"--master_port={free_port()}", *words))
    save_plan(plan, folder / "plan.yaml")
    (folder / "train.py").write_text(script)
    return run_folder(folder, extra)


def run_folder(
    folder: Path, extra: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``cxl-offload run plan.yaml`` in a folder that has the plan and its script."""
    given = environment(2)  # without ranks: the launcher gives them
    given["PYTHONPATH"] = os.pathsep.join([str(ROOT), given["PYTHONPATH"]])
    return subprocess.run(
        [sys.executable, "-m", "cxl_offload.cli.main", "run", "plan.yaml"],
        cwd=folder,
        env=given | (extra or {}),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def train(deepspeed_there: None, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Runs jobs in a process of their own, or in several."""

    def trained(jobs: list[Job], **options: Any) -> list[Any]:
        return run_worker(tmp_path_factory.mktemp("deepspeed"), jobs, **options)

    return trained
