"""The first lines of a plan: how doubtful its speed is, and how long the first answer takes."""

from __future__ import annotations

from typing import Any

import pytest

from cxl_offload.plan.headline import beside_measured, speed, waits
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


def test_run_of_another_size_than_its_plan_is_not_compared() -> None:
    planned = Batch(size=4096, count=2, prompt=64, tokens=16)
    same = beside_measured(194.7234, 26158.123, planned, rows=8192, prompt=64, generated=16)
    assert same == "Of the whole run 194.7 tokens/s measured; the plan predicted 26,160"
    for rows, prompt, generated in ((4, 64, 16), (8192, 16, 16), (8192, 64, 8)):
        said = beside_measured(
            194.7234, 26158.123, planned, rows=rows, prompt=prompt, generated=generated
        )
        assert said.startswith(same)
        assert said.endswith(
            "planned for 8192 sequences of 64 + 16 tokens, this run had "
            f"{rows} of {prompt} + {generated}: not comparable"
        )
