"""The first lines of a plan: how doubtful its speed is, and how long the first answer takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cxl_offload.files import read_text, shipped_file
from cxl_offload.plan.headline import WhatRan, beside_measured, speed, waits
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import Batch, CxlUse, PhaseEstimate, Plan
from cxl_offload.plan.replay_check import ReplayCheck


def plan(**changes: Any) -> Plan:
    """A plan of CPUs: 20 sequences of 100 + 11 tokens, prefill in 50 s, a token in 2 s."""
    made: dict[str, Any] = {
        "kind": "inference", "executor": "transformers", "runs": True,
        "model": "m", "machine": "here", "command": ("run",),
        "batch": Batch(size=10, count=2, prompt=100, tokens=11),
        "homes": (), "node_bytes": {}, "gpu_bytes": 0, "tokens_per_s": 398.76543,
        "phases": (
            PhaseEstimate(name="prefill", seconds=50.0, bottleneck="CPU work"),
            PhaseEstimate(name="decode, one token of every sequence", seconds=2.0, bottleneck="x"),
        ),
        "cxl": CxlUse(used=False, gain=None, reason="none is there"),
    }  # fmt: skip
    return Plan(**{**made, **changes})


def test_speed_carries_the_largest_difference_of_a_replay() -> None:
    notes = (
        "planned without a GPU",
        ReplayCheck("forward", 1.0, 1.2).sentence(),
        ReplayCheck("backward", 2.0, 3.1).sentence(),
        ReplayCheck("optimizer", 2.0, 1.0).sentence(),
    )
    assert speed(plan(notes=notes)) == (
        "398.8 tokens/s predicted; equations and replay of the backward differ by 55 %, "
        "see the notes"
    )
    assert speed(plan(notes=notes[:1])) == "398.8 tokens/s predicted"


@pytest.mark.parametrize("phase", ["decode", "parameters back to the GPU"])
@pytest.mark.parametrize("replayed", [0.25, 1e5])
def test_every_difference_that_is_noted_is_found_again(phase: str, replayed: float) -> None:
    said = speed(plan(notes=(ReplayCheck(phase, 1.0, replayed).sentence(),)))
    assert f"of the {phase} differ by {abs(replayed - 1) * 100:.0f} %" in said


def test_plan_of_throughput_says_when_the_first_answer_is_done() -> None:
    (said,) = waits(plan())
    assert "the first answer is done after 70 s (predicted), together with all 20" in said
    assert "--max-batches N plans for at most N sequences" in said
    (on_gpu,) = waits(plan(gpu_bytes=1))
    assert "--max-batches N plans for fewer batches at once" in on_gpu  # of any size
    (one,) = waits(plan(gpu_bytes=1, batch=Batch(size=10, count=1, prompt=100, tokens=11)))
    assert "--max-batches" not in one
    assert "--limit" in one


def test_plan_with_short_blocks_or_without_blocks_says_nothing_of_waiting() -> None:
    assert not [*waits(plan(batch=Batch(size=10, count=2, prompt=100, tokens=6)))]
    assert not [*waits(plan(phases=plan().phases[1:]))]


def ran(**changes: Any) -> WhatRan:
    """What :func:`plan` was made for."""
    made: dict[str, Any] = {
        "rows": 20, "prompt": 100, "generated": 11, "model": "m", "shape": None,
        "machine": "here", "accelerator": None,
    }  # fmt: skip
    return WhatRan(**{**made, **changes})


SAME = "Of the whole run 194.7 tokens/s measured; the plan predicted 398.8"


@pytest.mark.parametrize(
    ("change", "planned", "had"),
    [
        ({"rows": 4}, "20 sequences of 100 + 11 tokens", "4 of 100 + 11"),
        ({"prompt": 16}, "20 sequences of 100 + 11 tokens", "20 of 16 + 11"),
        ({"generated": 8}, "20 sequences of 100 + 11 tokens", "20 of 100 + 8"),
        ({"model": "my-opt"}, "model m", "model my-opt"),
        ({"machine": "there"}, "machine here", "machine there"),
        ({"accelerator": "cuda:0"}, "CPUs", "cuda:0"),
        ({"model": "n", "machine": "x"}, "model m, machine here", "model n, machine x"),
    ],
)
def test_run_of_something_else_than_its_plan_is_not_compared(
    change: dict[str, Any], planned: str, had: str
) -> None:
    assert beside_measured(194.7234, plan(), ran()) == SAME
    said = beside_measured(194.7234, plan(), ran(**change))
    assert said == f"{SAME}, planned for {planned}, this run had {had}: not comparable"


def test_model_is_known_by_its_sizes_whatever_its_folder_is_called() -> None:
    made, shape = plan(model="opt-1.3b"), load_model("opt-1.3b")
    own = ran(model="my-opt", shape=replace(shape, name="my-opt"))
    assert beside_measured(194.7234, made, own) == SAME
    larger = ran(model="opt-1.3b", shape=replace(shape, layers=48))
    said = beside_measured(194.7234, made, larger)
    assert said.endswith("model opt-1.3b, this run had another of that name: not comparable")


def test_sizes_of_a_planned_folder_are_those_of_its_command(tmp_path: Path) -> None:
    folder, shape = tmp_path / "mine", load_model("opt-1.3b")
    folder.mkdir()
    text = read_text(shipped_file("models", "opt-1.3b"))
    (folder / "config.json").write_text(json.dumps(yaml.safe_load(text)["config"]))
    made = plan(model="mine", command=("run", "--model", str(folder)))
    copied = ran(model="copied", shape=shape)
    assert beside_measured(194.7234, made, copied) == SAME
    moved = replace(made, command=("run", "--model", str(tmp_path / "gone")))
    assert "this run had model copied" in beside_measured(194.7234, moved, copied)
