"""Errors of memory as lines for people: only of what has some, or cannot be known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from cxl_offload.topology.cpulist import format_cpulist
from cxl_offload.topology.health import MachineHealth, NodeHealth
from cxl_offload.units import format_bytes


def print_health(console: Console, health: MachineHealth) -> None:
    """A line for each node and controller with errors, and one for nodes that cannot be known."""
    lines = [*_node_lines(health), *_machine_lines(health)]
    if lines:
        console.print(Text("\nHealth of the memory", "bold"))
    for line, style in lines:
        console.print(Padding(Text(line, style), (0, 0, 0, 1)))


def _node_lines(health: MachineHealth) -> Iterator[tuple[str, str]]:
    said: dict[tuple[str, str], list[int]] = {}
    for node in health.nodes:
        wrong, unknown = "; ".join(_errors(node)), "; ".join(_unknown(node))
        if wrong or unknown:
            line = "; ".join(filter(None, (wrong, unknown)))
            said.setdefault((line, "red" if wrong else "dim"), []).append(node.node)
    for (line, style), nodes in said.items():
        noun = "node" if len(nodes) == 1 else "nodes"
        yield f"{noun} {format_cpulist(nodes)}: {line}", style


def _errors(node: NodeHealth) -> Iterator[str]:
    lost = node.lost
    if lost is not None and lost.total:
        yield f"{lost.total} pages lost ({_counted(lost.outcomes) or 'not told how'})"
    for card in node.cards:
        told = _counted(card.counts)
        if told:
            yield f"card {card.address} has counted {told} errors"


def _unknown(node: NodeHealth) -> Iterator[str]:
    if node.lost is None:
        yield "lost pages are not known: this kernel does not count them"
    for address in node.uncounted:
        yield f"errors of card {address} are not known: its driver does not count them"


def _machine_lines(health: MachineHealth) -> Iterator[tuple[str, str]]:
    for one in health.controllers:
        told = _counted({"corrected": one.corrected, "uncorrected": one.uncorrected})
        if told:
            where = f" ({', '.join(one.modules)})" if one.modules else ""
            yield f"{one.name} ({one.title}): {told} errors{where}", "red"
    if health.soft_offlined_bytes:
        taken = format_bytes(health.soft_offlined_bytes)
        yield f"{taken} out of use on nodes unknown, moved away after corrected errors", "red"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)
