"""The first lines of a plan: how doubtful its speed is, and how long the first answer takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from cxl_offload.errors import ConfigError
from cxl_offload.plan.model.config import ModelConfig
from cxl_offload.plan.model.file import load_model, model_names
from cxl_offload.plan.plan_file import CopiesUse, Plan, Serving
from cxl_offload.plan.replay_check import stated_differences
from cxl_offload.units import format_number, format_seconds

LONG_WAIT_S = 60.0
"""A block that takes longer is named: whoever asked a question would have turned away."""


def speed(plan: Plan) -> str:
    """Tokens/s, that they are predicted, and by how much a replay differs."""
    said = f"{format_number(plan.tokens_per_s)} tokens/s predicted"
    found = max(stated_differences(plan.notes), key=lambda each: abs(each[1]), default=None)
    if found is None:
        return said
    phase, percent = found
    return f"{said}; equations and replay of the {phase} differ by {abs(percent)} %, see the notes"


def seen_by_requests(serving: Serving) -> str:
    """What a request sees of a server, as a sentence."""
    first, alone = format_seconds(serving.first_token_s), format_seconds(serving.alone_s)
    return (
        f"A request sees its first token after {first} while as many run as fit ({alone} alone), "
        f"later ones every {format_seconds(serving.per_token_s)} (predicted, in the mean)"
    )


def copies_in_words(copies: CopiesUse) -> str:
    """Whether weights have a copy near each socket, what it brings, and why."""
    said = "one near each socket" if copies.used else "left alone"
    gain = f" ({copies.gain:+.1%} predicted)" if copies.gain is not None and copies.used else ""
    return f"{said}{gain}; {copies.reason}"


def waits(plan: Plan) -> Iterator[str]:
    """That the plan is one of throughput, where a block takes long, and what makes it shorter."""
    phases = {phase.name.partition(",")[0]: phase.seconds for phase in plan.phases}
    if not {"prefill", "decode"} <= phases.keys():
        return  # requests come and go, or nothing is generated
    seconds = phases["prefill"] + (plan.batch.tokens - 1) * phases["decode"]
    if seconds <= LONG_WAIT_S:
        return
    rows = plan.batch.size * plan.batch.count
    if not plan.gpu_bytes:
        remedy = "--max-batches N plans for at most N sequences"
    elif plan.batch.count > 1:
        remedy = "--max-batches N plans for fewer batches at once, and --limit for less memory"
    else:
        remedy = "--limit plans for less memory, which has room for fewer sequences"
    yield (
        f"Highest throughput: the first answer is done after {format_seconds(seconds)} "
        f"(predicted), together with all {rows:,}. For a shorter wait, {remedy}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatRan:
    """Of a run what its plan may have been made for otherwise.

    Attributes
    ----------
    rows, prompt, generated
        Sequences, and tokens of each.
    model, shape
        Its name, and its sizes where they are known.
    machine
        The name of the one whose nodes held its bytes.
    accelerator
        What computed; None: the CPUs.
    """

    rows: int
    prompt: int
    generated: int
    model: str
    shape: ModelConfig | None
    machine: str
    accelerator: str | None


def beside_measured(measured: float, plan: Plan, ran: WhatRan) -> str:
    """A run's tokens/s beside those of its plan, and whether they can be compared at all."""
    said = (
        f"Of the whole run {format_number(measured)} tokens/s measured; the plan predicted "
        f"{format_number(plan.tokens_per_s)}"
    )
    unlike = [*_unlike(plan, ran)]
    if not unlike:
        return said
    planned, had = (", ".join(sides) for sides in zip(*unlike, strict=True))
    return f"{said}, planned for {planned}, this run had {had}: not comparable"


def _unlike(plan: Plan, ran: WhatRan) -> Iterator[tuple[str, str]]:
    """What was planned and what ran, of each thing that differs."""
    batch = plan.batch
    count = batch.size * batch.count
    if (count, batch.prompt, batch.tokens) != (ran.rows, ran.prompt, ran.generated):
        yield (
            f"{count} sequences of {batch.prompt} + {batch.tokens} tokens",
            f"{ran.rows} of {ran.prompt} + {ran.generated}",
        )
    if not _is_planned_model(plan, ran):
        other = "another of that name" if plan.model == ran.model else f"model {ran.model}"
        yield f"model {plan.model}", other
    if plan.machine != ran.machine:
        yield f"machine {plan.machine}", f"machine {ran.machine}"
    if bool(plan.gpu_bytes) != (ran.accelerator is not None):
        computing = ("a GPU" if plan.gpu_bytes else "CPUs", ran.accelerator or "CPUs")
        yield computing


def _is_planned_model(plan: Plan, ran: WhatRan) -> bool:
    """By their sizes, since a folder may have any name; by their names where sizes are unknown."""
    name = (
        plan.model if plan.model in model_names() else dict(pairwise(plan.command)).get("--model")
    )
    planned = None if name is None else sizes_of(name)
    if planned is None or planned.name != plan.model or ran.shape is None:
        return plan.model == ran.model
    return replace(planned, name="") == replace(ran.shape, name="")


def sizes_of(model: str) -> ModelConfig | None:
    """The sizes of a folder or a name; None where the planner cannot read them."""
    try:
        return load_model(model)
    except (ConfigError, OSError):
        return None
