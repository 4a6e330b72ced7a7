"""The machine as a picture: GPUs above, sockets with their DRAM, cards and other memory below."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from cxl_offload.report.charts import boxes_picture
from cxl_offload.report.page import escaped, shortened
from cxl_offload.topology import Gpu, Machine, Node, NodeKind
from cxl_offload.units import format_bandwidth, format_bytes

_W, _H, _GAP, _ROOM = 176, 96, 18, 46
_MOST_LETTERS = 24


def machine_picture(machine: Machine) -> str:
    """Inline SVG; bandwidth and latency are as its initiator's CPUs see a node."""
    own = [node for node in machine.nodes if node.cpus and node.kind is not NodeKind.GPU]
    far = [node for node in machine.nodes if node not in own]
    rows: list[list[Gpu | Node]] = [list(machine.gpus), list(own), list(far)]
    rows = [row for row in rows if row]
    widest = max(map(len, rows), default=1)
    width = widest * (_W + _GAP) + _GAP
    at: dict[int | str, tuple[float, int]] = {}
    for line, row in enumerate(rows):
        left = (width - len(row) * (_W + _GAP) + _GAP) / 2
        for number, each in enumerate(row):
            key = each.name if isinstance(each, Gpu) else each.id
            at[key] = (left + number * (_W + _GAP), line * (_H + _ROOM) + 8)
    parts = _links(machine, at)
    for row in rows:
        for each in row:
            key = each.name if isinstance(each, Gpu) else each.id
            colour, lines = _gpu(each) if isinstance(each, Gpu) else _node(machine, each)
            parts.append(_box(*at[key], colour, lines))
    height = len(rows) * (_H + _ROOM) - _ROOM + 16
    return boxes_picture(width, height, parts, f"machine {machine.name}")


def _box(x: float, y: int, colour: str, lines: Sequence[str]) -> str:
    text = "".join(
        f'<text x="{x + 10:.1f}" y="{y + 20 + 17 * at}"{"" if at == 0 else _DIM}>'
        f"{escaped(shortened(line, _MOST_LETTERS))}</text>"
        for at, line in enumerate(lines)
    )
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{_W}" height="{_H}" rx="8" fill="var(--card)" '
        f'stroke="{colour}" stroke-width="2"/>{text}'
    )


_DIM = ' class="d"'


def _rate(value: float | None) -> str:
    return "" if value is None else format_bandwidth(value)


def _gpu(gpu: Gpu) -> tuple[str, list[str]]:
    link = gpu.link
    memory = "" if gpu.memory_bytes is None else f", {format_bytes(gpu.memory_bytes)}"
    rates = (
        {}
        if link is None
        else {"to it": link.h2d_bandwidth_bytes_per_s, "from it": link.d2h_bandwidth_bytes_per_s}
    )
    links = [f"{way} {_rate(rate)}" for way, rate in rates.items() if rate is not None]
    lines = [f"{gpu.name}{memory}", gpu.model or "GPU", *(links or ["link: speed not known"])]
    return "var(--gpu)", lines


def _node(machine: Machine, node: Node) -> tuple[str, list[str]]:
    tier = machine.tier_of(node.id)
    colour = f"var(--{tier.name})" if tier is not None else "var(--line)"
    access = machine.access(machine.initiator, node.id)
    latency = None if access is None else access.read_latency_ns
    rate = _rate(None if access is None else access.read_bandwidth_bytes_per_s)
    seen = " · ".join(filter(None, [rate, "" if latency is None else f"{latency:.4g} ns"]))
    cpus = f", {len(node.cpus)} CPUs" if node.cpus else ""
    socket = "" if node.socket is None else f"socket {node.socket}"
    lines = [
        f"node {node.id}: {tier.name if tier else node.kind.value}{cpus}",
        format_bytes(node.capacity_bytes) if node.capacity_bytes else "size not known",
        seen or "speed not known",
        ", ".join(filter(None, [socket, node.kind.value.upper()])),
    ]
    return colour, lines


def _links(machine: Machine, at: dict[int | str, tuple[float, int]]) -> list[str]:
    """Lines: sockets among each other, GPUs and memory without CPUs to the nearest CPUs."""
    own = [node.id for node in machine.nodes if node.cpus and node.id in at]
    pairs: list[tuple[int | str, int]] = list(pairwise(own))
    pairs += [
        (gpu.name, gpu.node) for gpu in machine.gpus if gpu.node in own and gpu.node is not None
    ]
    for node in machine.nodes:
        near = [each for each in own if machine.distance(each, node.id) is not None]
        if node.id not in own and own:
            nearest = min(near or own, key=lambda each: machine.distance(each, node.id) or 0)
            pairs.append((node.id, nearest))
    return [_line(at[first], at[second]) for first, second in pairs]


def _line(first: tuple[float, int], second: tuple[float, int]) -> str:
    (x1, y1), (x2, y2) = sorted((first, second), key=lambda place: (place[1], place[0]))
    if y1 == y2:
        begin, end = (x1 + _W, y1 + _H / 2), (x2, y2 + _H / 2)
    else:
        begin, end = (x1 + _W / 2, y1 + _H), (x2 + _W / 2, float(y2))
    return (
        f'<path d="M{begin[0]:.1f} {begin[1]:.1f}L{end[0]:.1f} {end[1]:.1f}" '
        'stroke="var(--dim)" stroke-width="2"/>'
    )
