"""What on a machine will hurt tensors in tiers: found, priced, and with the command that fixes it.

Settings are read, never changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from cxl_offload.topology.discovery import discover
from cxl_offload.topology.hazards.health import HEALTH_CHECKS
from cxl_offload.topology.hazards.kernel import KERNEL_CHECKS
from cxl_offload.topology.hazards.model import SEVERITIES, Hazard, Scene, Severity
from cxl_offload.topology.hazards.nodes import NODE_CHECKS
from cxl_offload.topology.hazards.process import PROCESS_CHECKS
from cxl_offload.topology.health import read_health
from cxl_offload.topology.tree import Tree

__all__ = ["SEVERITIES", "Hazard", "Severity", "find_hazards"]

HazardCheck = Callable[[Scene], Iterator[Hazard]]


def find_hazards(
    root: str | os.PathLike[str] = "/", *, placing_refused: str | None = None, tried: bool = False
) -> tuple[Hazard, ...]:
    """Everything below ``root`` that costs speed, memory or placement; worst first.

    Parameters
    ----------
    root
        ``"/"``, or a folder with a captured ``sys`` and ``proc``.
    placing_refused
        The error with which this process's kernel refused to place a page, when that was tried.
    tried
        Whether placing a page was tried. Otherwise the process's seccomp mode and capabilities
        are judged, which only says that it may be refused.

    Raises
    ------
    ConfigError
        If there is no ``sys`` or ``proc`` below ``root``.
    """
    machine, tree = discover(root), Tree(root)
    health = read_health(tree, machine)
    scene = Scene(machine, tree, health, placing_refused=placing_refused, tried=tried)
    checks: tuple[HazardCheck, ...] = (
        *HEALTH_CHECKS,
        *NODE_CHECKS,
        *PROCESS_CHECKS,
        *KERNEL_CHECKS,
    )
    found = [hazard for check in checks for hazard in check(scene)]
    return tuple(sorted(found, key=lambda hazard: SEVERITIES.index(hazard.severity)))
