"""A machine as tables for people. Empty parts are left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cxl_offload.cli._link_report import print_citations, print_links
from cxl_offload.cli._report_table import NONE, Marks, lines, or_none, show, table
from cxl_offload.topology import (
    BlockGroup,
    Limits,
    Machine,
    Node,
    NodeKind,
    Zone,
    load_machine,
    machine_names,
)
from cxl_offload.topology.cpulist import format_cpulist
from cxl_offload.units import format_bytes

_STYLES = {
    NodeKind.DRAM: "green",
    NodeKind.CXL: "cyan",
    NodeKind.GPU: "magenta",
    NodeKind.HBM: "yellow",
    NodeKind.UNKNOWN: "dim",
}
_BAR_CELLS = 10


def print_machine(console: Console, machine: Machine, *, sources: bool = False) -> None:
    """Everything known about a machine; with ``sources``, also where each number comes from."""
    marks = Marks(machine)
    _print_head(console, machine)
    _print_nodes(console, machine, marks)
    _print_pages(console, machine.nodes)
    _print_evidence(console, machine)
    _print_dax(console, machine)
    print_links(console, machine, marks)
    if not machine.simulated:
        _print_limits(console, machine.limits)
    marks.explain(console)
    if sources:
        print_citations(console, machine)
    _print_notes(console, machine.notes)


def print_machine_list(console: Console) -> None:
    """Names and descriptions of the machine files that come with the package."""
    made = table("Machine files", "name", "machine", "choices")
    for name in machine_names():
        machine = load_machine(name)
        made.add_row(name, machine.description, ", ".join(machine.variant) or NONE)
    show(console, made)


def _print_head(console: Console, machine: Machine) -> None:
    console.print(Text.assemble((machine.name, "bold"), "  ", machine.description))
    if machine.simulated:
        console.print(Text(f"simulated, from a machine file after {machine.source}", "dim"))
    else:
        console.print(Text(f"read from {machine.source}", "dim"))
    if machine.variant:
        chosen = ", ".join(f"{name}={_choice(value)}" for name, value in machine.variant.items())
        console.print(Text(f"choices: {chosen}", "dim"))


def _choice(value: str | int | bool) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _print_nodes(console: Console, machine: Machine, marks: Marks) -> None:
    bare = [node.id for node in machine.nodes if _is_bare(node)] if not machine.simulated else []
    shown = [node for node in machine.nodes if node.id not in bare]
    described = any(node.description for node in shown)
    title = f"Nodes; tiers as seen from node {machine.initiator}"
    numbers = ("node", "socket", "memory", "free")
    columns = ("node", "kind", "tier", "socket", "CPUs", "memory", "usable")
    extra = ("what it is",) if described else ("free", "in use")
    made = table(title, *columns, *extra, right=numbers)
    for node in shown:
        _add_node(made, machine, node, marks, described=described)
    show(console, made)
    if bare:
        console.print(Text(f"with neither memory nor CPUs: {format_cpulist(bare)}", "dim"))
    tiers = [f"{tier.name} {','.join(map(str, tier.nodes)) or 'drive'}" for tier in machine.tiers]
    console.print(Text("tiers, nearest node first: " + (" | ".join(tiers) or "none"), "dim"))


def _is_bare(node: Node) -> bool:
    return not node.cpus and not node.capacity_bytes and not node.blocks


def _add_node(made: Table, machine: Machine, node: Node, marks: Marks, *, described: bool) -> None:
    tier = machine.tier_of(node.id)
    capacity = format_bytes(node.capacity_bytes) if node.capacity_bytes else NONE
    known = node.free_bytes is not None and node.capacity_bytes
    free = format_bytes(node.free_bytes or 0) if known else NONE
    made.add_row(
        str(node.id),
        Text(node.kind.value, _STYLES[node.kind]),
        tier.name if tier else NONE,
        or_none(node.socket),
        f"{format_cpulist(node.cpus)} ({len(node.cpus)})" if node.cpus else NONE,
        marks.mark(f"node {node.id} capacity", capacity),
        _usable(node),
        *((node.description,) if described else (free, _bar(node))),
    )


def _usable(node: Node) -> Text:
    if not node.online:
        return Text("offline", "dim")
    if not node.capacity_bytes:
        return Text("memory offline" if node.blocks else "size unknown", "dim")
    if not node.allowed:
        return Text("cpuset forbids", "red")
    return Text("when asked", "magenta") if node.kind is NodeKind.GPU else Text("yes", "green")


def _bar(node: Node) -> Text:
    """Share of the memory in use, as cells of a bar and per cent."""
    if not node.capacity_bytes or node.free_bytes is None:
        return Text("")
    share = 1 - node.free_bytes / node.capacity_bytes
    full = round(share * _BAR_CELLS)
    style = "red" if share > 0.9 else "yellow" if share > 0.7 else "green"
    cells = (("█" * full, style), ("░" * (_BAR_CELLS - full), "dim"))
    return Text.assemble(*cells, f" {share:4.0%}")


def _print_pages(console: Console, nodes: Sequence[Node]) -> None:
    made = table("Zones, memory blocks, huge pages", "node", "zones", "blocks", "huge pages")
    made.columns[0].justify = "right"
    for node in nodes:
        pools = [
            f"{format_bytes(pool.page_bytes)}: {pool.free} of {pool.total} free"
            for pool in node.huge_pages
        ]
        if node.zones or node.blocks or pools:
            made.add_row(
                str(node.id),
                lines(_zone(zone) for zone in node.zones),
                lines(_blocks(group) for group in node.blocks),
                lines(pools),
            )
    show(console, made)


def _zone(zone: Zone) -> str:
    free = "" if zone.free_bytes is None else f", {format_bytes(zone.free_bytes)} free"
    return f"{zone.name} {format_bytes(zone.managed_bytes)}{free}"


def _blocks(group: BlockGroup) -> str:
    zones = f", {group.valid_zones}" if group.valid_zones else ""
    return f"{group.blocks} {group.state}{zones} ({format_bytes(group.total_bytes)})"


def _print_evidence(console: Console, machine: Machine) -> None:
    made = table("CXL evidence", "node", "by", "region", "decoders", "memdevs", "PCI", "dax")
    made.columns[0].justify = "right"
    weak = []
    for node in machine.nodes:
        found = node.evidence
        if found is None:
            continue
        if found.kind != "cxl-region":
            weak.append(f"CXL evidence of node {node.id}: {found.kind}: {found.detail}")
            continue
        ways = f" ({found.interleave_ways} ways)" if found.interleave_ways else ""
        made.add_row(
            str(node.id),
            found.kind,
            f"{found.region}{ways}",
            lines(found.endpoint_decoders),
            lines(found.memdevs),
            lines(found.pci_addresses),
            found.dax or NONE,
        )
    show(console, made)
    for line in weak:
        console.print()
        console.print(Text(line))


def _print_dax(console: Console, machine: Machine) -> None:
    made = table("Device-DAX", "name", "mode", "size", "node", "CXL region", right=("size", "node"))
    for device in machine.dax:
        made.add_row(
            device.name,
            device.mode,
            format_bytes(device.size_bytes),
            or_none(device.target_node),
            device.cxl.region if device.cxl and device.cxl.region else NONE,
        )
    show(console, made)


def _print_limits(console: Console, limits: Limits) -> None:
    made = table("Limits of this process", "what", "value")
    made.add_row("nodes allowed", _allowed(limits.mems_allowed))
    made.add_row("CPUs allowed", _allowed(limits.cpus_allowed))
    memlock = limits.memlock_bytes
    made.add_row("locked memory", "no limit" if memlock is None else format_bytes(memlock))
    if limits.cgroup_version is not None:
        made.add_row(f"memory, cgroup v{limits.cgroup_version}", _cgroup(limits))
    show(console, made)


def _cgroup(limits: Limits) -> str:
    most, high, used = (
        None if value is None else format_bytes(value)
        for value in (
            limits.cgroup_max_bytes,
            limits.cgroup_high_bytes,
            limits.cgroup_current_bytes,
        )
    )
    parts = [most or "no limit"]
    parts += [f"throttled above {high}"] if high else []
    parts += [f"{used} in use"] if used else []
    return ", ".join(parts)


def _allowed(numbers: tuple[int, ...] | None) -> str:
    return "all" if numbers is None else format_cpulist(numbers) or "none"


def _print_notes(console: Console, notes: Iterable[str]) -> None:
    for index, note in enumerate(notes):
        if index == 0:
            console.print(Text("\nNotes", "bold"))
        made = Table.grid(padding=(0, 1))
        made.add_row("-", note)
        console.print(Padding(made, (0, 0, 0, 1)))
