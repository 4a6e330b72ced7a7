"""Stripes in the program of a placement: columns of every node, and what they may exceed."""

from __future__ import annotations

from cxl_offload.arrays import Floats
from cxl_offload.plan.flexgen.choice import Stripe, kv_stripe_slack, segments, stripe_slack
from cxl_offload.plan.flexgen.job import FlexGenJob
from cxl_offload.plan.flexgen.mode import STRIPE_TOTAL, Mode, Ratios
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.solve import Program, Terms

_HALVES = (STRIPE_TOTAL // 2, STRIPE_TOTAL // 2)
"""A stripe whose granule is that of all: it depends on the sum of weights alone."""


def segments_of(hardware: Hardware, stripe: Stripe | Ratios | None) -> tuple[Stripe, ...]:
    """The host's segments; ratios are one, of all nodes alike as long as nothing else is known."""
    if isinstance(stripe, Ratios):
        return ((1,) * len(hardware.nodes),)
    return segments(hardware, stripe)


def on_nodes(
    program: Program, hardware: Hardware, columns: list[int], stripe: Stripe | Ratios | None
) -> list[Terms]:
    """What every node has of a kind's columns on the host, one a segment; ratios add columns."""
    nodes = range(len(hardware.nodes))
    if not isinstance(stripe, Ratios):
        pairs = list(zip(columns, segments_of(hardware, stripe), strict=True))
        return [{column: part[at] / sum(part) for column, part in pairs} for at in nodes]
    (whole,) = columns
    limits = stripe.limits
    highs = [float("inf") if high else 0.0 for _, high in limits]
    parts = [program.column(f"part {at}", high=highs[at]) for at in nodes]
    program.row("parts", {**dict.fromkeys(parts, 1.0), whole: -1.0}, low=0.0, high=0.0)
    sums = zip(stripe.tiers, zip(stripe.low, stripe.high, strict=True), strict=True)
    several = [(tier, both) for tier, both in sums if len(tier) > 1]
    for tier, (low, high) in [*(((at,), both) for at, both in enumerate(limits)), *several]:
        here = dict.fromkeys((parts[at] for at in tier), 1.0)
        program.row("least of it", {**here, whole: -low / STRIPE_TOTAL}, low=0.0)
        program.row("most of it", {**here, whole: -high / STRIPE_TOTAL}, high=0.0)
    return [{part: 1.0} for part in parts]


def sixteenths(stripe: Ratios, on: list[Terms], values: Floats) -> list[float]:
    """Of every tier, where a solution has a kind; the least of each where it has none.

    Parameters
    ----------
    on
        Of ``on_nodes``.
    values
        float64 ``(columns,)``: the solution.
    """
    parts = [float(sum(values[column] for column in terms)) for terms in on]
    total = sum(parts)
    if total <= 0:
        return [float(low) for low in stripe.low]
    found = [STRIPE_TOTAL * sum(parts[at] for at in tier) / total for tier in stripe.tiers]
    limits = zip(found, stripe.low, stripe.high, strict=True)
    return [min(max(each, low), high) for each, low, high in limits]


def stripes_slack(job: FlexGenJob, mode: Mode, batches: int, nodes: int) -> list[float]:
    """Bytes by which stripes may exceed their shares, a node; of ratios the least."""
    weights, kv, made = mode.weight_stripe, mode.kv_stripe, [0.0] * nodes
    if isinstance(weights, Ratios):
        made = _least_slack(weights, min(stripe_slack(job, _HALVES)))
    elif weights is not None:
        made = list(stripe_slack(job, weights))
    if kv is None or mode.kv_on_gpu:
        return made
    if isinstance(kv, Ratios):
        more = _least_slack(kv, kv_stripe_slack(job, _HALVES))
    else:
        more = [kv_stripe_slack(job, kv) * (weight > 0) for weight in kv]
    return [have + batches * each for have, each in zip(made, more, strict=True)]


def _least_slack(ratios: Ratios, each: float) -> list[float]:
    return [each * (low > 0) for low, _ in ratios.limits]


def times(terms: Terms, factor: float) -> Terms:
    """Terms with every coefficient times a factor."""
    return {column: value * factor for column, value in terms.items()}


def slowest(stripe: Stripe, rates: list[float]) -> float:
    """Seconds a byte of a stripe: ``max(f_i / B_i)``."""
    total = sum(stripe)
    return max(w / total / rate for w, rate in zip(stripe, rates, strict=True) if w)
