"""What the next best placement would have cost, for every tier and every kind, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from cxl_offload.plan.executor import Candidate, Executor
from cxl_offload.plan.hardware import NVME, Hardware
from cxl_offload.units import format_bytes, format_number

T = TypeVar("T")

_SAME = 5e-4


def reasons(executor: Executor[T], found: Candidate[T]) -> Iterator[str]:
    """A sentence for every tier, used or not, and for every kind that could be elsewhere."""
    every = executor.hardware()
    for tier in dict.fromkeys(node.tier for node in every.nodes):
        yield _of_tier(executor, found, every, tier)
    if every.drive_usable_bytes:
        yield _of_tier(executor, found, every, NVME)
    for what, other in executor.other_homes(found):
        yield _compared(found, what, other)


def _of_tier(executor: Executor[T], found: Candidate[T], every: Hardware, tier: str) -> str:
    used = found.bytes_on(tier)
    if used:
        what = f"without {tier}, which holds {format_bytes(used)}"
        less = found.hardware.without(tier)
        return _compared(found, what, executor.search(less) if less.nodes else None)
    there = _with(found.hardware, every, tier)
    other = executor.search(there)
    if other is None or not other.bytes_on(tier):
        return f"with {tier} too: nothing would be put there"
    return _compared(found, f"with {format_bytes(other.bytes_on(tier))} on {tier} too", other)


def _with(hardware: Hardware, every: Hardware, tier: str) -> Hardware:
    """Hardware that has a tier of the whole machine besides its own."""
    if tier == NVME:
        return replace(hardware, drive_usable_bytes=every.drive_usable_bytes)
    have = {node.node for node in hardware.nodes}
    nodes = tuple(node for node in every.nodes if node.tier == tier or node.node in have)
    return replace(hardware, nodes=nodes)


def _compared(found: Candidate[T], what: str, other: Candidate[T] | None) -> str:
    if other is None:
        return f"{what}: not one batch would fit"
    change = other.tokens_per_s / found.tokens_per_s - 1
    rate = f"{format_number(other.tokens_per_s)} tokens/s"
    if abs(change) < _SAME:
        return f"{what}: {rate}, as fast"
    return f"{what}: {rate}, {abs(change):.1%} {'faster' if change > 0 else 'slower'}"
