"""Bytes per node and tier of allocations that do not exist yet, and whether they fit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cxl_offload.core import BASE_PAGE_BYTES
from cxl_offload.errors import ConfigError
from cxl_offload.integrations.flexgen.places import FlexGenKind, TierLimit
from cxl_offload.memory.policy import (
    Bind,
    Interleave,
    Policy,
    Preferred,
    Weighted,
)
from cxl_offload.plan.equations.stripe import stripe_bytes
from cxl_offload.units import format_bytes


@dataclass(frozen=True, slots=True)
class Need:
    """``count`` allocations of ``nbytes`` each for one part of a kind."""

    kind: FlexGenKind
    part: str
    policy: Policy
    nbytes: int
    count: int


def _striped(policy: Policy) -> tuple[Mapping[int, int], int] | None:
    if isinstance(policy, Interleave):
        return dict.fromkeys(policy.nodes, 1), policy.granule_bytes
    if isinstance(policy, Weighted):
        return policy.weights, policy.granule_bytes
    return None


def check_stripes(needs: Iterable[Need]) -> None:
    """Refuse an interleave that would silently leave one of its nodes without a byte.

    Raises
    ------
    ConfigError
        The tensors of a kind are too small for its granule; names a granule that works.
    """
    placed: defaultdict[tuple[FlexGenKind, str], Counter[int]] = defaultdict(Counter)
    largest: Counter[tuple[FlexGenKind, str]] = Counter()
    policies: dict[tuple[FlexGenKind, str], tuple[Mapping[int, int], int]] = {}
    for need in needs:
        stripe = _striped(need.policy)
        if stripe is None or need.kind == "act":
            continue  # activations shrink to one token a row; a stripe over them is best effort
        key = (need.kind, need.part)
        policies[key] = stripe
        largest[key] = max(largest[key], need.nbytes)
        for node, nbytes in stripe_bytes(need.nbytes, *stripe).items():
            placed[key][node] += nbytes * need.count
    for (kind, part), (weights, granule) in policies.items():
        empty = [node for node in weights if placed[kind, part][node] == 0]
        if empty:
            raise ConfigError(
                f"--place {kind}: the interleave would leave node {empty[0]} empty, because the "
                f"largest tensor ({format_bytes(largest[kind, part])}) is smaller than granule "
                f"{format_bytes(granule)} x weights {sum(weights.values())}; "
                f"{_remedy(largest[kind, part] // sum(weights.values()))}"
            )


def _remedy(granule: int) -> str:
    if granule < BASE_PAGE_BYTES:
        return "no granule is small enough: bind it, or split it by whole tensors"
    return (
        f"give a smaller granule, such as @{granule // BASE_PAGE_BYTES * BASE_PAGE_BYTES >> 10}KiB"
    )


class Room:
    """What nodes and tiers have left while needs are laid into them in order.

    Parameters
    ----------
    node_free
        Bytes that can still be allocated on every usable node.
    limits
        Tiers with capacities.
    local_node
        Where first touch puts pages.
    """

    def __init__(
        self, node_free: Mapping[int, int], limits: Sequence[TierLimit], local_node: int
    ) -> None:
        self.node_free = dict(node_free)
        self.limits = {limit.name: limit for limit in limits}
        self.tier_of = {node: limit.name for limit in limits for node in limit.nodes}
        self.local_node = local_node
        self.nodes: Counter[int] = Counter()
        self.tiers: defaultdict[str, Counter[FlexGenKind]] = defaultdict(Counter)

    def put(self, need: Need) -> None:
        """Lay a need out; what fits nowhere counts against the last node of its policy."""
        stripe = _striped(need.policy)
        if stripe is None:
            self._fill(need)
            return
        for node, nbytes in stripe_bytes(need.nbytes, *stripe).items():
            self._take(need.kind, node, nbytes * need.count)

    def _take(self, kind: FlexGenKind, node: int, nbytes: int) -> None:
        if nbytes == 0:
            return
        self.nodes[node] += nbytes
        if node in self.tier_of:
            self.tiers[self.tier_of[node]][kind] += nbytes

    def _fill(self, need: Need) -> None:
        """Bind and preferred fill nodes in order; preferred and first touch go on elsewhere."""
        policy = need.policy
        listed = policy.nodes if isinstance(policy, Bind | Preferred) else (self.local_node,)
        others = () if isinstance(policy, Bind) else sorted(set(self.node_free) - set(listed))
        left = need.nbytes * need.count
        for node in (*listed, *others):
            here = max(0, min(left, self._left(node)))
            self._take(need.kind, node, here)
            left -= here
        self._take(need.kind, listed[-1], left)

    def _left(self, node: int) -> int:
        left = self.node_free.get(node, 0) - self.nodes[node]
        limit = self.limits.get(self.tier_of.get(node, ""))
        if limit is not None and limit.capacity_bytes is not None:
            left = min(left, limit.capacity_bytes - self.tiers[limit.name].total())
        return left


def check_fit(needs: Iterable[Need], room: Room) -> dict[int, int]:
    """Lay all needs out and refuse what tiers or nodes cannot hold.

    Returns
    -------
    dict
        Node to bytes.

    Raises
    ------
    MemoryError
        Names the tier or node, what it needs by kind, and what it has.
    """
    for need in needs:
        room.put(need)
    for name, kinds in room.tiers.items():
        capacity = room.limits[name].capacity_bytes
        if capacity is not None and kinds.total() > capacity:
            raise MemoryError(
                f"tier {name}: {format_bytes(kinds.total())} needed ({_by_kind(kinds)}), capacity "
                f"{format_bytes(capacity)}; place less there or raise the capacity"
            )
    for node, nbytes in room.nodes.items():
        free = room.node_free.get(node, 0)
        if nbytes > free:
            raise MemoryError(
                f"node {node}: {format_bytes(nbytes)} needed, {format_bytes(free)} free; "
                f"place less there"
            )
    return dict(room.nodes)


def _by_kind(kinds: Mapping[FlexGenKind, int]) -> str:
    return " + ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in kinds.items())
