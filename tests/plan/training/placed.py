"""The placement that a search takes of one step: the fastest, nearest to the front of the nodes."""

from __future__ import annotations

from typing import Any

from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.training.placement import (
    StepEstimate,
    TrainingStep,
    Weights,
    fastest,
    nearest,
)


def place(
    step: TrainingStep, hardware: Hardware, *, most_s: float | None = None, **grid: Any
) -> tuple[Weights, StepEstimate] | None:
    """None where the host has no room, or the step takes longer than ``most_s``."""
    limit = {} if most_s is None else {"most_s": most_s}
    found = fastest(step, hardware, **limit, **grid)
    return None if found is None else nearest(step, hardware, *found, **grid)
