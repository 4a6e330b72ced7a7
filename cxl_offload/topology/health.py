"""Memory that breaks: what kernel and cards have counted of errors so far, by node.

Counters say what was, since the machine started or the driver was loaded. A card's list of poisoned
addresses and its events are not in sysfs: the kernel gives them as trace events, which ``cxl list
--media-errors`` asks for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cxl_offload.topology.model import Machine
from cxl_offload.topology.node import Node
from cxl_offload.topology.sysfs import NODES, base_page_bytes
from cxl_offload.topology.tree import PCI_DEVICES, Tree

EDAC = "/sys/devices/system/edac/mc"
_AER_TOTALS = {
    "correctable": "TOTAL_ERR_COR",
    "nonfatal": "TOTAL_ERR_NONFATAL",
    "fatal": "TOTAL_ERR_FATAL",
}


@dataclass(frozen=True, slots=True)
class LostPages:
    """Pages of a node that the kernel took out of use, because the hardware said they are wrong.

    Attributes
    ----------
    total
        All of them.
    recovered, ignored, failed, delayed
        What became of them; the kernel's own words.
    """

    total: int
    recovered: int = 0
    ignored: int = 0
    failed: int = 0
    delayed: int = 0

    @property
    def outcomes(self) -> dict[str, int]:
        """Outcome to pages."""
        return {
            "recovered": self.recovered,
            "ignored": self.ignored,
            "failed": self.failed,
            "delayed": self.delayed,
        }


@dataclass(frozen=True, slots=True)
class CardErrors:
    """Errors on the link of a card, as its PCI_DEVICES function has counted them (AER)."""

    address: str
    correctable: int
    nonfatal: int
    fatal: int

    @property
    def counts(self) -> dict[str, int]:
        """Severity to errors."""
        return {
            "correctable": self.correctable,
            "nonfatal": self.nonfatal,
            "fatal": self.fatal,
        }


@dataclass(frozen=True, slots=True)
class ControllerErrors:
    """Errors of a memory controller (EDAC), which belongs to no node that the kernel names.

    Attributes
    ----------
    name, title
        ``mc0``, and what its driver calls it.
    modules
        Labels of the modules that had errors.
    """

    name: str
    title: str
    corrected: int
    uncorrected: int
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """What is known of one node.

    Attributes
    ----------
    lost
        None: this kernel does not count lost pages.
    cards
        The cards behind a CXL node that count errors.
    uncounted
        PCI_DEVICES addresses of those that do not.
    """

    node: int
    lost: LostPages | None
    cards: tuple[CardErrors, ...] = ()
    uncounted: tuple[str, ...] = ()

    @property
    def has_errors(self) -> bool:
        """Whether anything was counted."""
        lost = self.lost is not None and self.lost.total > 0
        return lost or any(sum(card.counts.values()) for card in self.cards)


@dataclass(frozen=True, slots=True)
class MachineHealth:
    """What kernel and cards have counted.

    Attributes
    ----------
    nodes
        Of every node that has memory, or has counted errors.
    soft_offlined_bytes
        Bytes out of use that no node counts as lost: the kernel moved their contents away after
        corrected errors. None: this kernel does not say.
    """

    page_bytes: int
    nodes: tuple[NodeHealth, ...]
    controllers: tuple[ControllerErrors, ...]
    soft_offlined_bytes: int | None


def lost_pages_folder(node: int) -> str:
    """Where the kernel counts the lost pages of a node."""
    return f"{NODES}/node{node}/memory_failure"


def read_health(tree: Tree, machine: Machine) -> MachineHealth:
    """Reads all counters below the root of a tree, which is that of ``machine``.

    Nothing is asked of a device: the files are counters in the kernel's memory.
    """
    read = ((node, _node(tree, node)) for node in machine.nodes)
    nodes = tuple(health for node, health in read if node.has_memory or health.has_errors)
    page = base_page_bytes(tree)
    return MachineHealth(page, nodes, tuple(_controllers(tree)), _soft_offlined(tree, nodes, page))


def _node(tree: Tree, node: Node) -> NodeHealth:
    addresses = () if node.evidence is None else node.evidence.pci_addresses
    cards = {address: _card(tree, address) for address in addresses}
    return NodeHealth(
        node.id,
        _lost(tree, lost_pages_folder(node.id)),
        tuple(card for card in cards.values() if card is not None),
        tuple(address for address, card in cards.items() if card is None),
    )


def _lost(tree: Tree, folder: str) -> LostPages | None:
    total = tree.integer(f"{folder}/total")
    if total is None:
        return None
    names = ("recovered", "ignored", "failed", "delayed")
    return LostPages(total, *(tree.integer(f"{folder}/{name}") or 0 for name in names))


def _card(tree: Tree, address: str) -> CardErrors | None:
    counts = []
    for kind, total in _AER_TOTALS.items():
        text = tree.text(f"{PCI_DEVICES}/{address}/aer_dev_{kind}")
        found = re.search(rf"^{total} (\d+)$", text or "", re.MULTILINE)
        counts.append(int(found.group(1)) if found else None)
    if all(count is None for count in counts):
        return None
    return CardErrors(address, *(count or 0 for count in counts))


def _controllers(tree: Tree) -> Iterator[ControllerErrors]:
    for name in tree.names(EDAC, r"mc\d+"):
        folder = f"{EDAC}/{name}"
        yield ControllerErrors(
            name,
            tree.text(f"{folder}/mc_name") or "unnamed",
            tree.integer(f"{folder}/ce_count") or 0,
            tree.integer(f"{folder}/ue_count") or 0,
            tuple(_modules(tree, folder)),
        )


def _modules(tree: Tree, folder: str) -> Iterator[str]:
    for name in tree.names(folder, r"(dimm|rank)\d+"):
        counts = [tree.integer(f"{folder}/{name}/dimm_{kind}_count") or 0 for kind in ("ce", "ue")]
        if any(counts):
            yield tree.text(f"{folder}/{name}/dimm_label") or name


def _soft_offlined(tree: Tree, nodes: tuple[NodeHealth, ...], page: int) -> int | None:
    found = re.search(
        r"^HardwareCorrupted:\s+(\d+) kB", tree.text("/proc/meminfo") or "", re.MULTILINE
    )
    if found is None:
        return None
    lost = sum(node.lost.total for node in nodes if node.lost is not None)
    return max((int(found.group(1)) << 10) - lost * page, 0)
