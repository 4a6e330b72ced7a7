"""Which executors are planned for, whose plan is taken where that is left open, and what is said of
the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from cxl_offload.cli._progress import counted, progress_bar
from cxl_offload.errors import ConfigError
from cxl_offload.plan.asked_tiers import NVME, need_drive
from cxl_offload.units import format_number

if TYPE_CHECKING:
    from cxl_offload.plan.plan_file import Plan

Installed = Callable[[str], bool]

_EXECUTORS = ("flexgen", "transformers", "vllm")
"""Of inference, in the order in which equals are preferred."""


def executors_asked(
    asked: str,
    options: Mapping[tuple[str, ...], Mapping[str, object]],
    runs_in_flexgen: bool,
) -> list[str]:
    """Who is planned for; an option that only some of them have is refused with another.

    Parameters
    ----------
    options
        Executors to the options that they alone have, with what was given; None: nothing.
    """
    if asked not in ("auto", "flexgen-stock", *_EXECUTORS):
        raise ConfigError(
            f"--executor {asked}: must be auto, flexgen-stock, {', '.join(_EXECUTORS[:-1])} or "
            f"{_EXECUTORS[-1]}"
        )
    asked = "flexgen" if asked == "flexgen-stock" else asked
    wanted = [asked]
    if asked == "auto":
        wanted = [name for name in _EXECUTORS if name != "flexgen" or runs_in_flexgen]
    for owners, given in options.items():
        for name, value in given.items():
            if value is None:
                continue
            if asked not in ("auto", *owners):
                raise ConfigError(f"{name}: {asked} has no such option; leave it out")
            wanted = [each for each in wanted if each in owners] or list(owners[:1])
    return wanted


def refuse_idle_drive(shared: Mapping[str, Any], wanted: Sequence[str]) -> None:
    """Refuses a limit of the drive where FlexGen, which alone uses one, has no plan to make.

    Parameters
    ----------
    shared
        Options of all requests.
    wanted
        Who is planned for. Without FlexGen among them each refuses such a limit by itself.

    Raises
    ------
    ConfigError
        Says what is missing.
    """
    machine = shared["machine"]
    if NVME not in shared["limits"] or "flexgen" not in wanted:
        return
    need_drive(machine, f"limit of {NVME}")
    if not machine.gpus and len(wanted) > 1:
        raise ConfigError(
            f"limit of {NVME}: FlexGen alone uses a drive, and plans for none without a GPU, which "
            f"{machine.name} has not; leave it out"
        )


def without_drive(shared: Mapping[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
    """Options of a request for an executor that uses no drive.

    It keeps to any limit of one, which is left out where FlexGen is planned for too and means it.
    Alone it refuses such a limit, as nothing comes of it.
    """
    limits = shared["limits"]
    if "flexgen" in wanted:
        limits = {tier: nbytes for tier, nbytes in limits.items() if tier != NVME}
    return {**shared, "limits": limits}


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
    if not made:
        raise _why_none(refused)
    reasons = {plan.executor: why_not_here(plan, has) if here else "" for plan in made}
    best = max(made, key=lambda plan: (not reasons[plan.executor], plan.tokens_per_s))
    notes = [_beside(plan, reasons[plan.executor]) for plan in made if plan is not best]
    notes += [f"{name}: passed over: {error}" for name, error in refused.items()]
    return replace(best, notes=(*best.notes, *notes))


def _why_none(refused: Mapping[str, MemoryError | ValueError]) -> MemoryError | ValueError:
    """What lacks room could run the model, and says what to do; else every executor's reason."""
    errors = list(refused.values())
    for error in errors:
        if isinstance(error, MemoryError):
            return error
    if len({str(error) for error in errors}) == 1:
        return errors[0]
    return ConfigError("; ".join(f"{name}: {error}" for name, error in refused.items()))


def _beside(plan: Plan, reason: str) -> str:
    """What another executor would reach, and why it does not."""
    rate = f"{plan.executor}: {format_number(plan.tokens_per_s)} tokens/s (predicted)"
    return f"{rate}, passed over: {reason}" if reason else rate
