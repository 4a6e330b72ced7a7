"""What a plan says about a run with transformers: policies by kind, and rows of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.room import KeptAs, kept_as
from cxl_offload.memory import PolicyLike
from cxl_offload.plan.hardware import GPU
from cxl_offload.plan.plan_file import Plan, load_plan

Asked = Mapping[str, PolicyLike] | Plan | str | Path
"""Policies by kind, a plan, or the file of one."""


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """What is asked for; without a plan the policies alone."""

    policies: Mapping[str, PolicyLike]
    rows_at_once: int | None = None
    kv_dtype: KeptAs = None
    plan: Plan | None = None

    @property
    def accelerator(self) -> str | None:
        """What a plan is for; None: CPUs, or no plan."""
        return None if self.plan is None else self.plan.accelerator


def weights_as(dtype: torch.dtype | str, plan: Plan | None) -> torch.dtype | str:
    """The type of the weights: that of the plan, where ``"auto"`` leaves it open."""
    planned = None if plan is None else plan.dtype
    return planned or dtype if dtype == "auto" else dtype


def policies_of(plan: Plan) -> dict[str, str]:
    """The policy of every kind that the plan keeps in host memory, all of it or some layers.

    Raises
    ------
    ConfigError
        The plan is for another executor.
    """
    if plan.executor != "transformers":
        raise ConfigError(
            f"a plan for {plan.executor} on {plan.machine}: transformers run one that "
            "`cxl-offload plan inference --executor transformers` makes"
        )
    return {kind: text for kind, text in plan.policies.items() if text != GPU}


def asked_of(asked: Asked) -> PlanAnswer:
    """Policies by kind; rows of a layer, type of the cache, threads and accelerator of a plan.

    Raises
    ------
    ConfigError
        In one line: a file that is no plan, with its line, a plan for another executor, one that
        is advice only, or of a type that nothing is kept as.
    """
    if isinstance(asked, str | Path):
        if not Path(asked).exists():
            raise ConfigError(
                f"{asked}: no plan has this name; a policy is given with the kind that it is of, "
                f"such as {{'weights': '{asked}'}}"
            )
        asked = load_plan(asked)
    if not isinstance(asked, Plan):
        return PlanAnswer(asked)
    if not asked.runs:
        raise ConfigError(
            f"a plan that is advice only: {asked.advice}; plan again for what is there"
        )
    rows = asked.batch.size if asked.batch.count > 1 else None
    return PlanAnswer(policies_of(asked), rows, kept_as(asked.kv_dtype or None), asked)


def planned_for(rows: int, plan: Plan | None) -> PlanAnswer:
    """As :func:`asked_of`, for a run of so many rows; without a plan nothing.

    Raises
    ------
    ConfigError
        The plan is of fewer rows, or as of :func:`asked_of`.
    """
    if plan is None:
        return PlanAnswer({})
    answer, batch = asked_of(plan), plan.batch
    planned = batch.size * batch.count
    if rows > planned:
        raise ConfigError(
            f"{rows} prompts, and the plan is of {planned} at once ({batch.size} x {batch.count}); "
            "give as many, or plan again"
        )
    return answer
