"""How a user names places: ``--tier NAME=NODES:CAPACITY`` and ``--place KIND=POLICY``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.fit import TierLimit
from cxl_offload.renamed import old_names
from cxl_offload.topology import TIER_NAMES
from cxl_offload.units import parse_bytes

FlexGenKind = Literal["weights", "kv", "act", "workspace"]
KINDS: tuple[FlexGenKind, ...] = ("weights", "kv", "act", "workspace")
_MAX_DIGITS = 4  # of a node; a kernel has at most 1024
_HOST_TIERS = tuple(name for name in TIER_NAMES if name != "nvme")


@dataclass(frozen=True, slots=True)
class SplitPart:
    """One segment of a split: where it lies and how many percent of the bytes it gets."""

    place: str
    percent: float


@dataclass(frozen=True, slots=True)
class Split:
    """A placement by whole tensors: weights by tensor, KV cache by sequence."""

    parts: tuple[SplitPart, ...]


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


def parse_place(text: str) -> tuple[FlexGenKind, str]:
    """Kind and policy from ``KIND=POLICY``, such as ``kv=interleave:ldram,cxl``.

    Raises
    ------
    ConfigError
        No such kind, or no policy.
    """
    name, sign, policy = text.partition("=")
    for kind in KINDS:
        if kind == name and sign and policy:
            return kind, policy
    raise ConfigError(
        f"--place {text}: expected KIND=POLICY with a kind of {', '.join(KINDS)}, "
        f"such as kv=bind:cxl"
    )


def is_split(policy: str | None) -> bool:
    """Whether a policy text is a split by whole tensors."""
    return policy is not None and policy.startswith("split:")


def parse_split(text: str) -> Split | None:
    """The split in ``split:ldram=50,cxl=50``; ``None`` when the policy is another one.

    A part is a tier or node (bound to it) and its percentage of the host's share.

    Raises
    ------
    ConfigError
        Percentages that are no numbers above 0 or do not sum to 100, or a part named twice.
    """
    if not is_split(text):
        return None
    parts: list[SplitPart] = []
    for item in text.removeprefix("split:").split(","):
        place, sign, number = item.partition("=")
        if not sign or not place or re.fullmatch(r"\d+(\.\d+)?", number) is None:
            raise ConfigError(f"{text}: {item!r} is not TIER=PERCENT, such as cxl=50")
        if any(place == part.place for part in parts):
            raise ConfigError(f"{text}: {place} is named twice")
        parts.append(SplitPart(place, float(number)))
    if any(part.percent <= 0 for part in parts):
        raise ConfigError(f"{text}: every percentage must be above 0; leave the tier out instead")
    total = sum(part.percent for part in parts)
    if abs(total - 100) > 1e-6:
        raise ConfigError(f"{text}: the percentages sum to {total:g}, not 100")
    return Split(tuple(parts))


__getattr__ = old_names(__name__)
