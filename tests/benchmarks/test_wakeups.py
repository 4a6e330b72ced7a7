"""Parallel regions are counted by the sleeps of threads (benchmarks/wakeups.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.wakeups import PASSIVE, per_step

ROOT = Path(__file__).resolve().parents[2]
JOBS = """
import json
from statistics import median
import torch
from benchmarks.wakeups import is_passive, wakeups_of
from cxl_offload.ops.adam import CPUAdam, adam_step

torch.set_num_threads(2)
large, small = torch.zeros(400_000), torch.zeros(10)
tensors = [torch.ones(200_003) for _ in range(4)]
params = [torch.nn.Parameter(torch.zeros(100_000)) for _ in range(7)]
for param in params:
    param.grad = torch.ones_like(param)

def adds(count, tensor):
    def step():
        for _ in range(count):
            tensor.add_(1)
    return step

steps = {
    "one": (adds(1, large), 2),
    "three": (adds(3, large), 2),
    "too small for threads": (adds(3, small), 2),
    "a team on OpenMP's threads": (lambda: adam_step(*tensors, step=1, lr=0.5, threads=2), 2),
    "CPUAdam": (CPUAdam(params, threads=2).step, 2),
    "torch's AdamW": (torch.optim.AdamW(params, fused=True).step, 2),
    "a team of its own": (lambda: adam_step(*tensors, step=1, lr=0.5, threads=3), 3),
}
assert is_passive()
found = {}
for name, (step, threads) in steps.items():
    counted = [wakeups_of(step, threads=threads, lengths=(5, 25)) for _ in range(5)]
    found[name] = {
        "regions": median(each.regions for each in counted),
        "workers": median(each.workers for each in counted),
    }
print(json.dumps(found))
"""


def run_passively(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **PASSIVE, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow(reason="counts in a process of its own for seconds")
def test_a_job_of_known_regions_has_that_many() -> None:
    found = json.loads(run_passively("-c", JOBS))
    regions = {name: each["regions"] for name, each in found.items()}
    about = {"one": 1, "three": 3, "a team on OpenMP's threads": 1}
    about |= {"CPUAdam": 1, "torch's AdamW": 7}
    # On a busy machine a thread is often late enough for nobody to sleep for it.
    assert {name: regions[name] for name in about} == pytest.approx(about, rel=0.4)
    assert regions["too small for threads"] < 0.2
    # Each of two workers sleeps once a job, and seldom also for the team's lock.
    assert found["a team of its own"]["workers"] == pytest.approx(2, rel=0.4)


@pytest.mark.slow(reason="imports DeepSpeed and runs stock FlexGen beside ours")
def test_table_tells_the_regions_of_adam_and_flexgen(tmp_path: Path) -> None:
    pytest.importorskip("flexgen")
    path = tmp_path / "counted.json"
    sizes = ("--numel", "2e6", "--params", "20", "--layers", "1", "--cases", "all on the host")
    table = run_passively("-m", "benchmarks.count_wakeups", *sizes, "--json", str(path))
    document = json.loads(path.read_text())
    assert document["kind"] == "measured"
    regions = {}
    for row in document["results"]:
        regions[row["step"], row["by"]] = row["counted"]["regions"]
        assert f"| {row['step']} | {row['by']} | {row['counted']['regions']:.1f} | " in table
    adam = "Adam, 20 parameters"
    assert regions[adam, "cxl_offload"] == pytest.approx(1, rel=0.2)
    assert regions[adam, "torch AdamW fused"] == pytest.approx(20, rel=0.2)
    token = "a token, all on the host"
    assert 2 < regions[token, "this package"] < regions[token, "stock FlexGen"]


def test_what_a_run_costs_once_is_not_counted() -> None:
    short, long = {1: 50, 2: 110}, {1: 60, 2: 140}
    counted = per_step(short, long, steps=10, main=1, threads=2)
    assert (counted.regions, counted.wakeups) == (2.0, 4.0)
    assert (counted.workers, counted.main) == (3.0, 1.0)


def test_threads_that_started_in_the_long_run_count() -> None:
    counted = per_step({1: 5}, {1: 5, 2: 20, 3: 40}, steps=10, main=1, threads=3)
    assert (counted.workers, counted.busiest, counted.regions) == (6.0, 4.0, 1.5)


def test_one_thread_is_refused() -> None:
    with pytest.raises(ValueError, match="1 thread has no barriers to count"):
        per_step({1: 0}, {1: 5}, steps=1, main=1, threads=1)
