"""Slower tiers, and room for copies of weights, are used for a reason: the best plan with each of
them against the best without.

The slowest is asked first. A drive that brings little is left alone before CXL memory is looked
at, so that CXL memory never idles beside a drive that is read for every token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from cxl_offload.plan.executor import Candidate, Executor
from cxl_offload.plan.hardware import NVME, Hardware
from cxl_offload.plan.plan_file import CopiesUse, CxlUse
from cxl_offload.units import format_bytes

T = TypeVar("T")

CXL = "cxl"
_CALLED = {CXL: "CXL memory", NVME: "the drive"}


@dataclass(frozen=True, slots=True)
class _Verdict(Generic[T]):
    """The verdict on one tier: the candidate to go on with, and why."""

    best: Candidate[T]
    used: bool
    gain: float | None
    reason: str


def best_without_idle_tiers(
    executor: Executor[T],
) -> tuple[Candidate[T], CxlUse, CopiesUse | None]:
    """The best candidate, on the tiers that are worth it, and whether CXL memory is among them.

    And whether weights have copies near the sockets; None where they could have none.

    Raises
    ------
    MemoryError
        Nothing fits.
    """
    hardware = executor.hardware()
    best = executor.search(hardware) if hardware.nodes else None
    if best is None:
        raise MemoryError(executor.why_nothing_fits(hardware))
    best, copies = _ask_copies(executor, best)
    drive = _ask(executor, best, NVME)
    cxl = _ask(executor, drive.best if drive else best, CXL)
    best = cxl.best if cxl else drive.best if drive else best
    if cxl is None:
        return best, CxlUse(used=False, gain=None, reason="there is no CXL tier to use"), copies
    reason = cxl.reason if drive is None else f"{cxl.reason}; {drive.reason}"
    return best, CxlUse(used=cxl.used, gain=cxl.gain, reason=reason), copies


def _ask_copies(executor: Executor[T], best: Candidate[T]) -> tuple[Candidate[T], CopiesUse | None]:
    """The better of the plans with and without copies of weights, and why."""
    if not best.hardware.copy_nodes:
        return best, None
    more = executor.copied_bytes(best)
    if not more:
        reason = executor.why_no_copies(best)
        return best, CopiesUse(used=False, gain=0.0, bytes=0, reason=reason)
    without = executor.search(replace(best.hardware, copies=False))
    if without is None:
        return best, CopiesUse(used=True, gain=None, bytes=more, reason="nothing else fits")
    others = max(without.tokens_per_s, executor.rate_with_one_socket())
    gain, margin = best.tokens_per_s / others - 1, executor.request.cxl_margin
    if gain >= max(margin, 1e-12):
        reason = f"each socket reads what is near it, for {format_bytes(more)} more memory"
        return best, CopiesUse(used=True, gain=gain, bytes=more, reason=reason)
    reason = f"{format_bytes(more)} more memory would bring {_below(gain, margin)}"
    return without, CopiesUse(used=False, gain=max(0.0, gain), bytes=0, reason=reason)


def _ask(executor: Executor[T], best: Candidate[T], tier: str) -> _Verdict[T] | None:
    """The better of the plans with and without a tier; None where the machine has none."""
    hardware, called = best.hardware, _CALLED[tier]
    if not _has(hardware, tier):
        return None
    used = best.bytes_on(tier) > 0
    alone = hardware.without(tier)
    without = executor.search(alone) if alone.nodes else None
    if without is None:
        return _Verdict(best, used, None, f"without {called} not one batch fits")
    gain = best.tokens_per_s / without.tokens_per_s - 1
    if used and gain >= max(executor.request.cxl_margin, 1e-12):
        why = _why_used(best, without)
        return _Verdict(best, True, gain, why if tier == CXL else f"the drive brings {gain:.1%}")
    gain = max(0.0, gain)
    margin = executor.request.cxl_margin
    reason = f"{called} adds {_below(gain, margin)}"
    if gain <= 1e-9:
        reason = f"{called} adds nothing"
    if tier == CXL:
        reason = f"{reason}: {_what_bounds(executor, without)}"
    return _Verdict(without, False, gain, reason)


def _has(hardware: Hardware, tier: str) -> bool:
    if tier == NVME:
        return hardware.drive_usable_bytes > 0
    return any(node.tier == tier for node in hardware.nodes)


def _why_used(best: Candidate[T], without: Candidate[T]) -> str:
    if best.sequences > without.sequences:
        return f"its room allows {best.sequences} sequences at once, not {without.sequences}"
    if best.drive_bytes < without.drive_bytes:
        return "it keeps bytes in memory that would be on the drive"
    return "its bandwidth adds to that of the other tiers"


def _what_bounds(executor: Executor[T], without: Candidate[T]) -> str:
    if not sum(without.host) and not without.drive_bytes:
        return "the GPU holds everything"
    repeated = executor.phases(without)[-1]
    free = sum(node.usable_bytes for node in without.hardware.nodes) - sum(without.host)
    return (
        f"the {repeated.name.split(',')[0]} is bound by {repeated.bottleneck}, and "
        f"{format_bytes(free)} of other memory is free"
    )


def _below(gain: float, margin: float) -> str:
    """Both in percents, with as many digits as tell them apart."""
    digits = 1 if f"{gain:.1%}" != f"{margin:.1%}" else 2
    return f"{gain:.{digits}%}, below the margin of {margin:.{digits}%}"
