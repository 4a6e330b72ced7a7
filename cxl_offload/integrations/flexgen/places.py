"""How a user names places: ``--place KIND=POLICY`` and splits by whole tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.fit import TierLimit
from cxl_offload.integrations.named_tiers import parse_tier
from cxl_offload.renamed import old_names

__all__ = [
    "KINDS",
    "FlexGenKind",
    "Split",
    "SplitPart",
    "TierLimit",
    "is_split",
    "parse_place",
    "parse_split",
    "parse_tier",
]

FlexGenKind = Literal["weights", "kv", "act", "workspace"]
KINDS: tuple[FlexGenKind, ...] = ("weights", "kv", "act", "workspace")


@dataclass(frozen=True, slots=True)
class SplitPart:
    """One segment of a split: where it lies and how many percent of the bytes it gets."""

    place: str
    percent: float


@dataclass(frozen=True, slots=True)
class Split:
    """A placement by whole tensors: weights by tensor, KV cache by sequence."""

    parts: tuple[SplitPart, ...]


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
