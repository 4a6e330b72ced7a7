"""The first lines of a plan: how doubtful its speed is, and how long the first answer takes."""

from __future__ import annotations

from collections.abc import Iterator

from cxl_offload.plan.plan_file import Batch, CopiesUse, Plan, Serving
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


def beside_measured(
    measured: float, predicted: float, planned: Batch, *, rows: int, prompt: int, generated: int
) -> str:
    """A run's tokens/s beside those of its plan, and whether they can be compared at all."""
    count = planned.size * planned.count
    said = (
        f"Of the whole run {format_number(measured)} tokens/s measured; the plan predicted "
        f"{format_number(predicted)}"
    )
    if (count, planned.prompt, planned.tokens) == (rows, prompt, generated):
        return said
    return (
        f"{said}, planned for {count} sequences of {planned.prompt} + {planned.tokens} tokens, "
        f"this run had {rows} of {prompt} + {generated}: not comparable"
    )
