"""Hazards of memory that breaks: what :mod:`cxl_offload.topology.health` has read, priced."""

from __future__ import annotations

from collections.abc import Iterator

from cxl_offload.topology.hazards.model import Hazard, Scene
from cxl_offload.topology.health import EDAC, lost_pages_folder
from cxl_offload.topology.tree import PCI_DEVICES
from cxl_offload.units import format_bytes


def _lost_pages(scene: Scene) -> Iterator[Hazard]:
    """Pages that the kernel took out of use because the hardware said that they are wrong."""
    for node in scene.health.nodes:
        lost = node.lost
        if lost is None or not lost.total:
            continue
        told = ", ".join(f"{count} {name}" for name, count in lost.outcomes.items() if count)
        yield Hazard(
            "lost-pages",
            "error" if lost.failed or lost.ignored else "warning",
            f"node {node.node}: {lost.total} pages "
            f"({format_bytes(lost.total * scene.health.page_bytes)}) lost to memory errors "
            f"({told or 'not told how'})",
            "what was in them is gone: a process that reads one is ended by SIGBUS; where that "
            "failed or was ignored the kernel may still use them",
            "ras-mc-ctl --errors  # rasdaemon: which part; leave the node out of policies, and "
            "have the part replaced",
            f"{lost_pages_folder(node.node)}; Documentation/ABI/stable/sysfs-devices-node, "
            "memory_failure",
        )


def _soft_offlined(scene: Scene) -> Iterator[Hazard]:
    """Pages that left their node because of corrected errors count for no node."""
    taken = scene.health.soft_offlined_bytes
    if taken:
        yield Hazard(
            "soft-offlined-pages",
            "warning",
            f"{format_bytes(taken)} of pages are out of use, and no node counts them as lost",
            "the kernel takes pages out after many corrected errors, and moves what was in them, "
            "without a word and maybe to another node: a placement that is asked again shows it",
            "ras-mc-ctl --errors  # rasdaemon: which part",
            "HardwareCorrupted in /proc/meminfo; Documentation/mm/hwpoison.rst",
        )


def _memory_controllers(scene: Scene) -> Iterator[Hazard]:
    for one in scene.health.controllers:
        if not one.corrected and not one.uncorrected:
            continue
        where = ", ".join(one.modules)
        yield Hazard(
            "memory-errors",
            "error" if one.uncorrected else "warning",
            f"{one.name} ({one.title}): {one.corrected} corrected and {one.uncorrected} "
            "uncorrected errors" + (f" ({where})" if where else ""),
            "a module with corrected errors has uncorrected ones more often than others; an "
            "uncorrected one ends who reads it",
            "ras-mc-ctl --error-count  # rasdaemon: by module; have the module replaced",
            f"{EDAC}/{one.name}/{{ce,ue}}_count; Documentation/admin-guide/RAS/main.rst, EDAC",
        )


def _links_of_cards(scene: Scene) -> Iterator[Hazard]:
    """Errors that the PCI functions of the cards behind CXL nodes have counted."""
    for node in scene.health.nodes:
        for card in node.cards:
            told = ", ".join(f"{count} {kind}" for kind, count in card.counts.items() if count)
            if not told:
                continue
            yield Hazard(
                "cxl-link-errors",
                "error" if card.fatal or card.nonfatal else "note",
                f"the card of CXL node {node.node} at PCI {card.address} has counted errors: "
                f"{told}",
                "corrected ones are sent again and cost bandwidth; others may take the card, and "
                "all memory of its node, away",
                "cxl list -M --media-errors  # look at the slot, the riser and the card's firmware",
                f"{PCI_DEVICES}/{card.address}/aer_dev_*; "
                "Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats",
            )


HEALTH_CHECKS = (_lost_pages, _soft_offlined, _memory_controllers, _links_of_cards)
