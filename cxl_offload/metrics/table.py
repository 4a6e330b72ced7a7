"""The metrics: what each is called, measures and is split by. Everything else follows from here.

The Prometheus name of ``node.held`` in bytes is ``cxl_offload_node_held_bytes``, that of a counter
ends with ``_total``; OpenTelemetry calls it ``cxl_offload.node.held`` with the unit ``By``, which
its own exporter for Prometheus turns into the same name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cxl_offload.topology import Machine


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes
    ----------
    stem
        Its name without the prefix, the unit and the ``_total`` of a counter.
    kind
        A counter never falls while its process lives.
    unit
        ``"bytes"``, or nothing for a plain number.
    labels
        What it is split by.
    text
        One sentence.
    """

    stem: str
    kind: Literal["gauge", "counter"]
    unit: Literal["bytes", ""]
    labels: tuple[str, ...]
    text: str

    @property
    def prometheus_name(self) -> str:
        """As it appears on the page."""
        parts = ["cxl_offload", self.stem.replace(".", "_"), self.unit]
        return "_".join([*filter(None, parts), *(["total"] if self.kind == "counter" else [])])

    @property
    def otel_name(self) -> str:
        return f"cxl_offload.{self.stem}"

    @property
    def otel_unit(self) -> str:
        return "By" if self.unit == "bytes" else ""


def tier_label(machine: Machine, node: int) -> str:
    """The value of the label ``tier``; empty for a node of no tier."""
    tier = machine.tier_of(node)
    return "" if tier is None else tier.name


_NODE = ("node", "tier")
_LINK = ("direction", "node")
_TUNER = ("framework", "tuner", "outcome")

METRICS = (
    Metric("info", "gauge", "", ("version", "machine", "nodes"), "1; nodes: real or simulated."),
    Metric("pool.asked", "gauge", "bytes", (), "Bytes that live allocations asked for."),
    Metric("pool.held", "gauge", "bytes", (), "The same, rounded up to the blocks that hold them."),
    Metric("pool.mapped", "gauge", "bytes", (), "Bytes mapped, live or cached."),
    Metric(
        "pool.mapped_peak", "gauge", "bytes", (), "The most bytes mapped since the session began."
    ),
    Metric("pool.cached", "gauge", "bytes", (), "Bytes mapped but free for the next allocation."),
    Metric("pool.live_allocations", "gauge", "", (), "Allocations that are alive."),
    Metric("pool.allocations", "counter", "", (), "Allocations that were ever made."),
    Metric("pool.allocated", "counter", "bytes", (), "Bytes that allocations have ever asked for."),
    Metric("node.held", "gauge", "bytes", _NODE, "Bytes the session holds there, cached included."),
    Metric(
        "node.held_peak", "gauge", "bytes", _NODE, "The most bytes the session ever held there."
    ),
    Metric("node.limit", "gauge", "bytes", _NODE, "Most the session may hold there, if limited."),
    Metric("node.capacity", "gauge", "bytes", _NODE, "Memory of the node."),
    Metric(
        "node.free", "gauge", "bytes", _NODE, "What the node can still give, clean page cache too."
    ),
    Metric("device.held", "gauge", "bytes", ("device",), "Bytes held of a Device-DAX device."),
    Metric("kind.requested", "gauge", "bytes", ("kind",), "Live bytes that a kind asked for."),
    Metric(
        "kind.granted",
        "gauge",
        "bytes",
        ("kind", *_NODE),
        "Live bytes of a kind on a node, as they were put there.",
    ),
    Metric("copy", "counter", "bytes", _LINK, "Bytes copied between a node and a GPU."),
    Metric("copy.pieces", "counter", "", _LINK, "Copies that these bytes were made of."),
    Metric("copy.staged", "counter", "bytes", _LINK, "Those of them that were not pinned."),
    Metric("tune.decisions", "counter", "", _TUNER, "Decisions of tuners."),
    Metric("tune.moved", "counter", "bytes", _TUNER, "Bytes that moved by decisions of tuners."),
    Metric(
        "node.lost_pages",
        "counter",
        "",
        (*_NODE, "outcome"),
        "Pages lost to memory errors since the machine started.",
    ),
    Metric(
        "node.link_errors",
        "counter",
        "",
        (*_NODE, "card", "severity"),
        "Errors on the link of a CXL node's card.",
    ),
    Metric(
        "memory.errors",
        "counter",
        "",
        ("controller", "severity"),
        "Errors that a memory controller counted.",
    ),
    Metric(
        "memory.soft_offlined",
        "gauge",
        "bytes",
        (),
        "Bytes taken out of use that no node counts as lost.",
    ),
    Metric(
        "findings",
        "gauge",
        "",
        ("finding", "severity"),
        "What doctor finds, looked at each minute.",
    ),
)
"""All metrics, in the order of the documentation."""
