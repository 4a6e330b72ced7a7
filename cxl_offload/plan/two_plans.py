"""Two plans side by side: what the second gains, and what of it is not memory's doing."""

from __future__ import annotations

from dataclasses import dataclass

from cxl_offload.errors import ConfigError
from cxl_offload.plan.plan_file import Plan


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """What a second plan is to a first one.

    Attributes
    ----------
    gain
        Predicted tokens/s of the second over those of the first, less one; None where their tokens
        are of other models or lengths, and where the first predicts none.
    notes
        What they differ in besides memory, so that their speeds say little about memory.
    """

    gain: float | None
    notes: tuple[str, ...]


def compare_plans(first: Plan, second: Plan) -> PlanComparison:
    """How much faster the second plan is than the first, as both predict it.

    Raises
    ------
    ConfigError
        One is of inference and the other of training, which have no speed in common.

    Examples
    --------
    >>> compare_plans(load_plan("without.yaml"), load_plan("with.yaml")).gain  # doctest: +SKIP
    0.083
    """
    if first.kind != second.kind:
        raise ConfigError(
            f"plan compare: the first plan is of {first.kind} and the second of {second.kind}: "
            "tokens generated and tokens trained on are not alike; compare two of one kind"
        )
    alike = first.model == second.model and _lengths(first) == _lengths(second)
    gain = None
    if alike and first.tokens_per_s:
        gain = second.tokens_per_s / first.tokens_per_s - 1
    return PlanComparison(gain, tuple(_besides_memory(first, second)))


def _lengths(plan: Plan) -> tuple[int, int]:
    return plan.batch.prompt, plan.batch.tokens


def _besides_memory(first: Plan, second: Plan) -> list[str]:
    found = []
    if first.executor != second.executor:
        found.append(
            f"the first is for {first.executor}, the second for {second.executor}: the speeds are "
            "those of two programs, whatever the memory; to compare memory, plan both with the "
            "same --executor"
        )
    if first.model != second.model:
        found.append(f"the models differ: {first.model} and {second.model}")
    if _lengths(first) != _lengths(second):
        found.append("the lengths of prompts or answers differ, so tokens/s are of other work")
    return found
