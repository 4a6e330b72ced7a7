"""What this machine has counted of memory errors, and what doctor finds on it, as samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from cxl_offload.metrics.table import tier_label
from cxl_offload.topology import Machine
from cxl_offload.topology.hazards import Hazard, find_hazards
from cxl_offload.topology.health import MachineHealth, read_health
from cxl_offload.topology.tree import Tree

HEALTH_EVERY_S = 60.0
"""The files are many, and what they say changes slowly."""


def health_here(machine: Machine) -> MachineHealth:
    """The counters of the machine that this process runs on."""
    return read_health(Tree("/"), machine)


class HealthReader:
    """Looks at most once a minute; not thread-safe.

    Parameters
    ----------
    find, look
        What looks for hazards, and what reads the counters of a machine.
    """

    def __init__(
        self,
        find: Callable[[], Iterable[Hazard]] = find_hazards,
        look: Callable[[Machine], MachineHealth] = health_here,
    ) -> None:
        self._find, self._look = find, look
        self._looked_at: float | None = None
        self._found: tuple[Hazard, ...] = ()
        self._health: MachineHealth | None = None

    def add_to(self, add: Callable[..., None], machine: Machine, now: float) -> None:
        """Adds the samples of all metrics of health."""
        if self._looked_at is None or now - self._looked_at >= HEALTH_EVERY_S:
            self._looked_at = now
            self._found = tuple(self._find())
            self._health = self._look(machine)
        for (name, severity), count in Counter(
            (each.name, each.severity) for each in self._found
        ).items():
            add("findings", count, name, severity)
        if self._health is not None:
            _add_counters(add, self._health, machine)


def _add_counters(add: Callable[..., None], health: MachineHealth, machine: Machine) -> None:
    for node in health.nodes:
        labels = (node.node, tier_label(machine, node.node))
        for outcome, pages in (node.lost.outcomes if node.lost is not None else {}).items():
            add("node.lost_pages", pages, *labels, outcome)
        for card in node.cards:
            for severity, errors in card.counts.items():
                add("node.link_errors", errors, *labels, card.address, severity)
    for one in health.controllers:
        add("memory.errors", one.corrected, one.name, "corrected")
        add("memory.errors", one.uncorrected, one.name, "uncorrected")
    if health.soft_offlined_bytes is not None:
        add("memory.soft_offlined", health.soft_offlined_bytes)
