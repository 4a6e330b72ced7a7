"""The machine that a profile belongs to."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from cxl_offload.errors import ConfigError
from cxl_offload.profile.model import Fingerprint, NodeFacts, Profile
from cxl_offload.topology import Machine


def read_fingerprint(machine: Machine, *, isa: str, root: str | Path = "/") -> Fingerprint:
    """The fingerprint of the running machine.

    Parameters
    ----------
    machine
        Its nodes, as discovered.
    isa
        The instruction set that is measured with.
    root
        Where ``proc`` and ``sys`` are, for captured trees.
    """
    return Fingerprint(
        cpu_model=_cpu_model(Path(root) / "proc/cpuinfo"),
        cpus=sum(len(node.cpus) for node in machine.nodes),
        nodes=tuple(
            NodeFacts(
                id=node.id,
                kind=node.kind.value,
                cpus=len(node.cpus),
                capacity_bytes=node.capacity_bytes,
            )
            for node in machine.nodes
        ),
        kernel=os.uname().release,
        page_bytes=os.sysconf("SC_PAGESIZE"),
        transparent_huge_pages=_chosen(Path(root) / "sys/kernel/mm/transparent_hugepage/enabled"),
        isa=isa,
        gpus=tuple(gpu.model or gpu.name for gpu in machine.gpus),
    )


def check_same_machine(
    profile: Profile, machine: Machine, *, file: str | Path, root: str | Path = "/"
) -> None:
    """Refuses a profile of another machine than the running one.

    Parameters
    ----------
    machine
        The running machine, as discovered.
    file
        Where the profile comes from, for the message.

    Raises
    ------
    ConfigError
        One line with all that differs.
    """
    here = read_fingerprint(machine, isa=profile.machine.isa, root=root)
    differing = profile.machine.mismatches(here)
    if differing:
        raise ConfigError(
            f"is a profile of another machine ({'; '.join(differing)}); measure this one with "
            "`cxl-offload profile --output FILE`",
            file=str(file),
        )


def check_same_nodes(profile: Profile, machine: Machine, *, file: str | Path) -> None:
    """Refuses a profile whose machine cannot be the one that a machine file describes.

    Files leave out processors, and count CPUs with or without their second threads; so nodes and
    what they are have to be the same.

    Parameters
    ----------
    machine
        As its file describes it.
    file
        Where the profile comes from, for the message.

    Raises
    ------
    ConfigError
        One line with the nodes of both.
    """
    there = {node.id: node.kind.value for node in machine.nodes}
    measured = {node.id: node.kind for node in profile.machine.nodes}
    if measured != there:
        raise ConfigError(
            f"was measured on a machine with {_nodes(measured)}; {machine.name} has "
            f"{_nodes(there)}: leave --machine or --profile out",
            file=str(file),
        )


def _nodes(kinds: Mapping[int, str]) -> str:
    return ", ".join(f"node {node} ({kind})" for node, kind in sorted(kinds.items()))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cpu_model(path: Path) -> str:
    """The model's name; Arm cores have none there, but the numbers of their maker and part."""
    entries = dict(re.findall(r"^([^\t:]+?)\s*:[ \t]*(\S.*)$", _read(path), re.MULTILINE))
    if "model name" in entries:
        return " ".join(entries["model name"].split())
    parts = [f"{key} {entries[key]}" for key in ("CPU implementer", "CPU part") if key in entries]
    return ", ".join(parts) or f"unknown ({os.uname().machine})"


def _chosen(path: Path) -> str:
    """The bracketed word of a kernel setting such as ``always [madvise] never``."""
    match = re.search(r"\[(\w+)\]", _read(path))
    return match.group(1) if match else "unknown"
