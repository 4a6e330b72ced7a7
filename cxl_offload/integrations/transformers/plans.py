"""What a plan says about a run with transformers: policies by kind, and rows of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.compute_device import ON_ACCELERATOR
from cxl_offload.integrations.transformers.room import KeptAs, kept_as
from cxl_offload.memory import PolicyLike
from cxl_offload.plan.plan_file import Plan, load_plan

Asked = Mapping[str, PolicyLike] | Plan | str | Path
"""Policies by kind, a plan, or the file of one."""


@dataclass(frozen=True, slots=True)
class _Answer:
    policies: Mapping[str, PolicyLike]
    rows_at_once: int | None = None
    kv_dtype: KeptAs = None
    plan: Plan | None = None


def policies_of(plan: Plan) -> dict[str, str]:
    """The policy of every kind that the plan keeps in host memory.

    Raises
    ------
    ConfigError
        The plan is for another executor, or keeps nothing in host memory.
    """
    if plan.executor != "transformers":
        raise ConfigError(
            f"a plan for {plan.executor} on {plan.machine}: transformers run one that "
            "`cxl-offload plan inference --executor transformers` makes"
        )
    kept = {kind: text for kind, text in plan.policies.items() if text != ON_ACCELERATOR}
    if not kept:
        raise ConfigError(
            f"a plan that keeps all of {plan.model} on the accelerator: run it without offload()"
        )
    return kept


def asked_of(asked: Asked) -> _Answer:
    """Policies by kind; rows of a layer, the type of keys and values, and threads of a plan.

    Raises
    ------
    ConfigError
        In one line: a file that is no plan, with its line, a plan for another executor, or of a
        type that nothing is kept as.
    """
    if isinstance(asked, str | Path):
        asked = load_plan(asked)
    if not isinstance(asked, Plan):
        return _Answer(asked)
    rows = asked.batch.size if asked.batch.count > 1 else None
    return _Answer(policies_of(asked), rows, kept_as(asked.kv_dtype or None), asked)
