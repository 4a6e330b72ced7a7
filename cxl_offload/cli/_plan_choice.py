"""Which executor's plan is taken where ``--executor auto`` leaves it open, and what is said of the
others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from cxl_offload.cli._progress import counted, progress_bar
from cxl_offload.units import format_number

if TYPE_CHECKING:
    from cxl_offload.plan.plan_file import Plan

Installed = Callable[[str], bool]


def installed(package: str) -> bool:
    """Whether a package can be imported here."""
    return find_spec(package) is not None


def why_not_here(plan: Plan, has: Installed = installed) -> str:
    """Why nothing on this machine runs a plan as it stands; empty: something does."""
    if not plan.runs:
        return plan.advice
    package = plan.executor
    return "" if has(package) else f"{package} is not installed here"


def fastest(
    plans: Mapping[str, Callable[[], Plan]],
    *,
    lines: bool,
    here: bool = False,
    has: Installed = installed,
) -> Plan:
    """Of the executors that can, the one with the most tokens/s, prompts included.

    Parameters
    ----------
    plans
        Makes the plan of an executor, by its name.
    lines
        Whether progress may be shown.
    here
        The plan is for this machine: one that runs on it as it stands goes before a faster one that
        does not.
    has
        Tells whether a package is installed.

    Raises
    ------
    MemoryError, ValueError
        What was wrong, where no executor can.
    """
    made: list[Plan] = []
    refused: dict[str, MemoryError | ValueError] = {}
    with progress_bar(keep=False, lines=lines) as tell:
        for name, plan in counted(list(plans.items()), "executors planned for", tell):
            try:
                made.append(plan())
            except (MemoryError, ValueError) as error:
                refused[name] = error
    if not made:  # what lacks room could run the model, and says what to do about it
        errors = list(refused.values())
        raise next((error for error in errors if isinstance(error, MemoryError)), errors[0])
    reasons = {plan.executor: why_not_here(plan, has) if here else "" for plan in made}
    best = max(made, key=lambda plan: (not reasons[plan.executor], plan.tokens_per_s))
    notes = [_beside(plan, reasons[plan.executor]) for plan in made if plan is not best]
    notes += [f"{name}: passed over: {error}" for name, error in refused.items()]
    return replace(best, notes=(*best.notes, *notes))


def _beside(plan: Plan, reason: str) -> str:
    """What another executor would reach, and why it does not."""
    rate = f"{plan.executor}: {format_number(plan.tokens_per_s)} tokens/s (predicted)"
    return f"{rate}, passed over: {reason}" if reason else rate
