"""Tiers that a user names: ``--tier NAME=NODES``, in place of those of the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.fit import TierLimit, tier_limits
from cxl_offload.topology import TIER_NAMES, Machine, Tier
from cxl_offload.units import parse_bytes

_MAX_DIGITS = 4  # of a node; a kernel has at most 1024
_HOST_TIERS = tuple(name for name in TIER_NAMES if name != "nvme")


def check_tiers(tiers: tuple[TierLimit, ...]) -> None:
    """Refuse unknown names and nodes in two tiers.

    Raises
    ------
    ConfigError
        Names the tier and the node.
    """
    owner: dict[int, str] = {}
    names: set[str] = set()
    for tier in tiers:
        if tier.name not in _HOST_TIERS:
            raise ConfigError(f"--tier {tier.name}: tiers are {', '.join(_HOST_TIERS)}")
        if tier.name in names:
            raise ConfigError(f"--tier {tier.name}: given twice")
        names.add(tier.name)
        for node in tier.nodes:
            if node in owner:
                raise ConfigError(
                    f"--tier {tier.name}: node {node} is already in tier {owner[node]}; "
                    f"a node belongs to one tier"
                )
            owner[node] = tier.name


def with_tiers(machine: Machine, limits: Sequence[TierLimit]) -> Machine:
    """``machine`` with the tiers of ``limits`` in place of those that share a name or a node.

    Raises
    ------
    ConfigError
        A node that the machine does not have or this process may not use.
    """
    usable = {node.id for node in machine.usable_nodes(include_gpu_memory=True)}
    for limit in limits:
        for node in limit.nodes:
            if node not in usable:
                known = ", ".join(str(each) for each in sorted(usable))
                raise ConfigError(
                    f"--tier {limit.name}: node {node} has no memory that this process may use "
                    f"on {machine.name}; usable nodes are {known}"
                )
    names = {limit.name for limit in limits}
    nodes = {node for limit in limits for node in limit.nodes}
    kept = [t for t in machine.tiers if t.name not in names and not nodes & set(t.nodes)]
    added = [Tier(limit.name, limit.nodes) for limit in limits]
    return replace(machine, tiers=(*added, *kept))


def parse_tier(text: str) -> TierLimit:
    """A tier from ``NAME=NODES:CAPACITY``, such as ``cxl=2,3:128GiB`` or ``ldram=0``.

    Raises
    ------
    ConfigError
        The text is not of that form.
    """
    name, sign, rest = text.partition("=")
    nodes_text, colon, capacity_text = rest.partition(":")
    if not sign or not name:
        raise ConfigError(f"--tier {text}: expected NAME=NODES:CAPACITY, such as cxl=2,3:128GiB")
    capacity = None
    if colon:
        try:
            capacity = parse_bytes(capacity_text)
        except ValueError as error:
            raise ConfigError(f"--tier {text}: {error}") from None
        if capacity <= 0:
            raise ConfigError(f"--tier {text}: the capacity must be above 0")
    return TierLimit(name, _parse_nodes(nodes_text, text), capacity)


def _parse_nodes(nodes_text: str, text: str) -> tuple[int, ...]:
    nodes: list[int] = []
    for part in nodes_text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            raise ConfigError(f"--tier {text}: {part!r} is not a node or a range of nodes")
        if max(map(len, match.groups(default=""))) > _MAX_DIGITS:
            raise ConfigError(f"--tier {text}: {part!r}: no machine has so many nodes")
        first = int(match.group(1))
        last = int(match.group(2) or first)
        if last < first:
            raise ConfigError(f"--tier {text}: range {part} runs backwards")
        nodes.extend(range(first, last + 1))
    if len(set(nodes)) != len(nodes):
        raise ConfigError(f"--tier {text}: a node is named twice")
    return tuple(nodes)


def limited(
    tiers: Sequence[TierLimit], most: Mapping[str, int]
) -> tuple[tuple[TierLimit, ...], dict[str, int]]:
    """Tiers with what ``--limit`` says of them, and what it says of others.

    Raises
    ------
    ConfigError
        A tier has a size already.
    """
    asked, made = dict(most), []
    for tier in tiers:
        size = asked.pop(tier.name, None)
        if size is not None and tier.capacity_bytes is not None:
            raise ConfigError(f"--limit {tier.name}: --tier gives it a size too; leave one out")
        made.append(tier if size is None else replace(tier, capacity_bytes=size))
    return tuple(made), asked


def named_tiers(texts: Sequence[str]) -> tuple[TierLimit, ...]:
    """What ``--tier`` says, each time it is given.

    Raises
    ------
    ConfigError
        A text is not of the form, a name that no tier has, or a node in two of them.
    """
    made = tuple(parse_tier(text) for text in texts)
    check_tiers(made)
    return made


def limits_on(
    machine: Machine, tiers: Sequence[TierLimit], most: Mapping[str, int]
) -> tuple[TierLimit, ...]:
    """Tiers that are named, and those that ``--limit`` names besides, with what each may hold.

    Parameters
    ----------
    machine
        Has the named tiers already, see :func:`with_tiers`.

    Raises
    ------
    ConfigError, ValueError
        A tier has two sizes, or is none of the machine's.
    """
    named, others = limited(tiers, most)
    return (*named, *tier_limits(machine, others))
