"""How memory is reached, as tables: by CPUs, by GPUs, drives, and where the numbers come from."""

from __future__ import annotations

from rich.console import Console

from cxl_offload.cli._report_table import NONE, Marks, lines, or_none, show, table
from cxl_offload.topology import Access, Gpu, Link, Machine
from cxl_offload.units import GB, format_bandwidth, format_bytes, format_seconds


def print_links(console: Console, machine: Machine, marks: Marks) -> None:
    """Distances, accesses, GPUs, copies, drives and other published numbers."""
    _print_distances(console, machine)
    _print_accesses(console, machine, marks)
    _print_gpus(console, machine, marks)
    _print_copies(console, machine, marks)
    _print_drives(console, machine, marks)
    _print_facts(console, machine, marks)


def _print_distances(console: Console, machine: Machine) -> None:
    full = [node.id for node in machine.nodes if machine.simulated or node.cpus or node.has_memory]
    if len(full) < 2 or not machine.distances:
        return
    columns = [f"{'to ' if index == 0 else ''}{target}" for index, target in enumerate(full)]
    status = [citation.status for citation in machine.citations if citation.what == "distances"]
    title = f"Distances ({status[0]})" if status else "Distances"
    made = table(title, "from", *columns, right=("from", *columns))
    for initiator, row in machine.distances.items():
        if initiator in full:
            made.add_row(str(initiator), *(or_none(row.get(target)) for target in full))
    show(console, made)


def _print_accesses(console: Console, machine: Machine, marks: Marks) -> None:
    numbers = ("read ns", "write ns", "read GB/s", "write GB/s")
    made = table(
        "Access by CPUs: idle latency, saturated bandwidth",
        *("from", "to", *numbers, "source"),
        right=("from", "to", *numbers),
    )
    for access in machine.accesses:
        made.add_row(
            str(access.initiator),
            str(access.target),
            *_access_numbers(access, marks),
            access.source or NONE,
        )
    show(console, made)


def _access_numbers(access: Access, marks: Marks) -> list[str]:
    what = f"access {access.initiator}->{access.target}"
    values = {
        "read latency": (access.read_latency_ns, 1.0),
        "write latency": (access.write_latency_ns, 1.0),
        "read bandwidth": (access.read_bandwidth_bytes_per_s, GB),
        "write bandwidth": (access.write_bandwidth_bytes_per_s, GB),
    }
    return [
        marks.mark(f"{what} {name}", NONE if value is None else f"{value / scale:.4g}")
        for name, (value, scale) in values.items()
    ]


def _print_gpus(console: Console, machine: Machine, marks: Marks) -> None:
    made = table(
        "GPUs",
        "name",
        "model and PCI address",
        "node",
        "memory",
        "link to the host",
        right=("node",),
    )
    for gpu in machine.gpus:
        own = "" if gpu.memory_node is None else f" = node {gpu.memory_node}"
        memory = format_bytes(gpu.memory_bytes) if gpu.memory_bytes else "unknown"
        made.add_row(
            gpu.name,
            lines(part for part in (gpu.model, gpu.pci_address) if part),
            or_none(gpu.node),
            marks.mark(f"GPU {gpu.name} memory", memory) + own,
            NONE if gpu.link is None else _link(gpu, gpu.link, marks),
        )
    show(console, made)


def _link(gpu: Gpu, link: Link, marks: Marks) -> str:
    def rate(name: str, value: float | None) -> str:
        if value is None:
            return NONE
        # what sysfs shows is the signalling rate
        bound = "≤" if not marks_known and value == link.peak_bandwidth_bytes_per_s else ""
        return marks.mark(f"GPU {gpu.name} link {name}", bound + format_bandwidth(value))

    marks_known = not link.source.startswith("signalling")
    to_gpu = rate("host to device", link.h2d_bandwidth_bytes_per_s)
    to_host = rate("device to host", link.d2h_bandwidth_bytes_per_s)
    rates = f"to GPU {to_gpu}, to host {to_host}"
    if to_gpu == to_host:
        rates = f"{to_gpu} each way"
    if link.setup_s:
        rates += ", " + marks.mark(f"GPU {gpu.name} link setup", format_seconds(link.setup_s))
        rates += " a copy"
    return lines(part for part in (link.description, rates) if part)


def _print_copies(console: Console, machine: Machine, marks: Marks) -> None:
    numbers = ("node", "to GPU", "to host", "extra latency")
    made = table("GPU copies: what a node delivers", "GPU", *numbers, right=numbers)
    for path in machine.dma_paths:
        what = f"copies {path.gpu}-{path.node}"
        extra = f"{path.extra_latency_ns:.4g} ns" if path.extra_latency_ns else NONE
        made.add_row(
            path.gpu,
            str(path.node),
            marks.mark(f"{what} host to device", _bandwidth(path.h2d_bandwidth_bytes_per_s)),
            marks.mark(f"{what} device to host", _bandwidth(path.d2h_bandwidth_bytes_per_s)),
            marks.mark(f"{what} extra latency", extra),
        )
    show(console, made)


def _print_drives(console: Console, machine: Machine, marks: Marks) -> None:
    numbers = ("size", "read", "write")
    made = table("Drives: the tier nvme", "name", *numbers, right=numbers)
    for drive in machine.drives:
        what = f"drive {drive.name}"
        made.add_row(
            drive.name,
            marks.mark(f"{what} capacity", format_bytes(drive.capacity_bytes)),
            marks.mark(f"{what} read bandwidth", _bandwidth(drive.read_bandwidth_bytes_per_s)),
            marks.mark(f"{what} write bandwidth", _bandwidth(drive.write_bandwidth_bytes_per_s)),
        )
    show(console, made)


def _print_facts(console: Console, machine: Machine, marks: Marks) -> None:
    made = table("Other published numbers", "name", "value", "source", right=("value",))
    for fact in machine.facts:
        value = f"{fact.value:g}"
        if fact.name.endswith("_bytes_per_s"):
            value = format_bandwidth(fact.value)
        elif fact.name.endswith("_ns"):
            value = f"{fact.value:g} ns"
        made.add_row(fact.name, marks.mark(fact.name, value), fact.source)
    show(console, made)


def print_citations(console: Console, machine: Machine) -> None:
    """Every number of a machine file with its source, derivation or reason."""
    made = table("Sources", "number", "value", "is", "source or reason")
    for citation in machine.citations:
        bound = f", {citation.bound} bound" if citation.bound else ""
        why = {
            "printed": citation.source,
            "derived": f"{citation.source}: {citation.note}",
            "assumed": citation.note,
        }[citation.status]
        made.add_row(citation.what, citation.value, f"{citation.status}{bound}", why)
    show(console, made)


def _bandwidth(value: float | None) -> str:
    return NONE if value is None else format_bandwidth(value)
