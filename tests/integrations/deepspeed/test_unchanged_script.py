"""``cxl-offload run`` places the tensors of a script that does not know of this package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT, environment, free_port

SCRIPT = str(ROOT / "tests" / "integrations" / "deepspeed" / "script.py")
POLICY = "exp_avg=bind:0; staging=interleave:0"


def start(command: list[str], *, processes: int = 1, **extra: str) -> str:
    """What a command wrote to its standard error."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(processes) | extra,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stderr


def losses(output: Path, rank: int = 0) -> Any:
    return json.loads(Path(f"{output}.{rank}").read_text())


def placed(command: list[str], plan: str = POLICY) -> list[str]:
    run = [sys.executable, "-m", "cxl_offload.cli.main", "run", "--plan", plan, "--"]
    return run + command


@pytest.fixture(scope="module")
def stock(deepspeed_there: None, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Losses of the script alone, by stage."""
    folder = tmp_path_factory.mktemp("stock")
    made = {}
    for stage in (2, 3):
        made[stage] = folder / str(stage)
        start([sys.executable, SCRIPT, str(made[stage]), "--stage", str(stage)])
    return made


@pytest.mark.parametrize("stage", [2, 3])
def test_unchanged_script_trains_the_same_bits_with_its_tensors_placed(
    stock: dict[int, Path], tmp_path: Path, stage: int
) -> None:
    script = [sys.executable, SCRIPT, str(tmp_path / "placed"), "--stage", str(stage)]
    told = start(placed(script))
    assert losses(tmp_path / "placed") == losses(stock[stage])
    rows = {line.split()[0]: line for line in told.splitlines() if line.strip()}
    assert "bind:0" in rows["exp_avg"]
    assert "preferred:0" in rows["exp_avg_sq"]
    assert "interleave:0" in rows["staging"]
    assert "node 0: 528 KiB" in rows["exp_avg"]
    assert "nothing was placed" not in told


def test_script_without_the_variable_is_left_alone(stock: dict[int, Path]) -> None:
    assert losses(stock[2]) != losses(stock[3])  # stage 3 computes in another order
    assert len(losses(stock[2])) == 4


def launcher(name: str) -> list[str]:
    port = free_port()
    if name == "torchrun":
        words = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    else:
        words = ["-m", "deepspeed.launcher.runner", "--num_accelerators=2"]
        words += [f"--master_port={port}"]
    return [sys.executable, *words, SCRIPT]


def test_launchers_of_several_processes_place_in_every_one(
    deepspeed_there: None, tmp_path: Path
) -> None:
    start([*launcher("deepspeed"), str(tmp_path / "stock")], processes=2)
    for name in ("deepspeed", "torchrun"):
        told = start(placed([*launcher(name), str(tmp_path / name)]), processes=2)
        assert "nothing was placed" not in told
        assert "node 0: 264 KiB" in told  # half of the states
        assert "may hold: rank 0 (1 of 2 on this machine)" in told
        for rank in range(2):
            assert losses(tmp_path / name, rank) == losses(tmp_path / "stock", rank)
    assert losses(tmp_path / "stock", 0) != losses(tmp_path / "stock", 1)


def test_wrong_plan_stops_the_script_before_it_trains(
    deepspeed_there: None, tmp_path: Path
) -> None:
    done = subprocess.run(
        placed([sys.executable, SCRIPT, str(tmp_path / "never")], "exp_avg=bind:99"),
        cwd=ROOT,
        env=environment(1),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "99" in done.stderr
    assert not Path(f"{tmp_path / 'never'}.0").exists()


def test_page_of_a_run_shows_what_was_granted(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    page = tmp_path / "run.html"
    script = [sys.executable, SCRIPT, str(tmp_path / "losses"), "--stage", "2"]
    command = placed(script)
    command[command.index("--plan") : command.index("--plan")] = ["--report", str(page)]
    assert f"report: {page}" in start(command)
    text = page.read_text()
    for said in ("exp_avg_sq", "bind:0", "Requested against granted", "ended after"):
        assert said in text


OWN = """
import cxl_offload, deepspeed, torch

model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1))
config = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
with cxl_offload.integrations.deepspeed.placing("interleave:0") as placed:
    engine, *_ = deepspeed.initialize(model=model, config=config)
print(placed.table())
"""


def test_script_that_places_by_itself_is_told_that_the_plan_is_not_used(
    deepspeed_there: None, tmp_path: Path
) -> None:
    script = tmp_path / "own.py"
    script.write_text(OWN)
    told = start(placed([sys.executable, str(script)]))
    assert "the script places its engine itself and keeps doing so; the plan is not used" in told
    assert "nothing was placed" not in told
