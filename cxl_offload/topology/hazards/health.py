"""Memory that breaks: what kernel and cards have counted of errors so far.

Counters say what was, since the machine started or the driver was loaded. A card's list of poisoned
addresses is not in sysfs: the kernel gives it as trace events, which ``cxl list --media-errors``
asks for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from cxl_offload.topology.hazards.model import Hazard, Scene
from cxl_offload.topology.sysfs import NODES, base_page_bytes
from cxl_offload.topology.tree import Tree
from cxl_offload.units import format_bytes

_EDAC = "/sys/devices/system/edac/mc"
_PCI = "/sys/bus/pci/devices"
_AER = {
    "correctable": "TOTAL_ERR_COR",
    "nonfatal": "TOTAL_ERR_NONFATAL",
    "fatal": "TOTAL_ERR_FATAL",
}


def _lost_pages(scene: Scene) -> Iterator[Hazard]:
    """Pages that the kernel took out of use because the hardware said that they are wrong."""
    page = base_page_bytes(scene.tree)
    for node in scene.machine.nodes:
        folder = f"{NODES}/node{node.id}/memory_failure"
        names = ("total", "recovered", "ignored", "failed", "delayed")
        counts = {name: scene.tree.integer(f"{folder}/{name}") or 0 for name in names}
        total = counts.pop("total")
        if not total:
            continue
        told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        yield Hazard(
            "lost-pages",
            "error" if counts["failed"] or counts["ignored"] else "warning",
            f"node {node.id}: {total} pages ({format_bytes(total * page)}) lost to memory errors "
            f"({told or 'not told how'})",
            "what was in them is gone: a process that reads one is ended by SIGBUS; where that "
            "failed or was ignored the kernel may still use them",
            "ras-mc-ctl --errors  (rasdaemon: which part); leave the node out of policies, and "
            "have the part replaced",
            f"{folder}; Documentation/ABI/stable/sysfs-devices-node, memory_failure",
        )


def _soft_offlined(scene: Scene) -> Iterator[Hazard]:
    """Pages that left their node because of corrected errors count for no node."""
    text = scene.tree.text("/proc/meminfo") or ""
    found = re.search(r"^HardwareCorrupted:\s+(\d+) kB", text, re.MULTILINE)
    folders = (f"{NODES}/node{node.id}/memory_failure" for node in scene.machine.nodes)
    lost = sum(scene.tree.integer(f"{folder}/total") or 0 for folder in folders)
    taken = int(found.group(1)) << 10 if found else 0
    more = taken - lost * base_page_bytes(scene.tree)
    if more > 0:
        yield Hazard(
            "soft-offlined-pages",
            "warning",
            f"{format_bytes(more)} of pages are out of use, and no node counts them as lost",
            "the kernel takes pages out after many corrected errors, and moves what was in them, "
            "without a word and maybe to another node: a placement that is asked again shows it",
            "ras-mc-ctl --errors  (rasdaemon: which part)",
            "HardwareCorrupted in /proc/meminfo; Documentation/mm/hwpoison.rst",
        )


def _memory_controllers(scene: Scene) -> Iterator[Hazard]:
    for name in scene.tree.names(_EDAC, r"mc\d+"):
        folder = f"{_EDAC}/{name}"
        corrected = scene.tree.integer(f"{folder}/ce_count") or 0
        uncorrected = scene.tree.integer(f"{folder}/ue_count") or 0
        if not corrected and not uncorrected:
            continue
        where = ", ".join(_modules(scene.tree, folder))
        yield Hazard(
            "memory-errors",
            "error" if uncorrected else "warning",
            f"{name} ({scene.tree.text(f'{folder}/mc_name') or 'unnamed'}): {corrected} corrected "
            f"and {uncorrected} uncorrected errors" + (f" ({where})" if where else ""),
            "a module with corrected errors has uncorrected ones more often than others; an "
            "uncorrected one ends who reads it",
            "ras-mc-ctl --error-count  (rasdaemon: by module); have the module replaced",
            f"{folder}/{{ce,ue}}_count; Documentation/admin-guide/RAS/main.rst, EDAC",
        )


def _modules(tree: Tree, folder: str) -> Iterator[str]:
    for name in tree.names(folder, r"(dimm|rank)\d+"):
        counts = [tree.integer(f"{folder}/{name}/dimm_{kind}_count") or 0 for kind in ("ce", "ue")]
        if any(counts):
            yield tree.text(f"{folder}/{name}/dimm_label") or name


def _links_of_cards(scene: Scene) -> Iterator[Hazard]:
    """Errors that the PCI functions of the cards behind CXL nodes have counted."""
    for node in scene.cxl_nodes:
        for address in () if node.evidence is None else node.evidence.pci_addresses:
            counts = {kind: _aer_total(scene.tree, address, kind) for kind in _AER}
            if not any(counts.values()):
                continue
            told = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
            yield Hazard(
                "cxl-link-errors",
                "error" if counts["fatal"] or counts["nonfatal"] else "note",
                f"the card of CXL node {node.id} at PCI {address} has counted errors: {told}",
                "corrected ones are sent again and cost bandwidth; others may take the card, and "
                "all memory of its node, away",
                "cxl list -M --media-errors; look at the slot, the riser and the card's firmware",
                f"{_PCI}/{address}/aer_dev_*; "
                "Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats",
            )


def _aer_total(tree: Tree, address: str, kind: str) -> int:
    text = tree.text(f"{_PCI}/{address}/aer_dev_{kind}") or ""
    found = re.search(rf"^{_AER[kind]} (\d+)$", text, re.MULTILINE)
    return int(found.group(1)) if found else 0


HEALTH_CHECKS = (_lost_pages, _soft_offlined, _memory_controllers, _links_of_cards)
