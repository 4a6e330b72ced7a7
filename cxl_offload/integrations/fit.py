"""Whether the nodes and tiers can hold what a run will allocate, before it loads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cxl_offload.memory import Session
from cxl_offload.memory.policy import Bind, Dax, Interleave, Policy, Preferred, Replicate, Weighted
from cxl_offload.plan.equations.stripe import stripe_bytes
from cxl_offload.renamed import old_names
from cxl_offload.topology import Machine
from cxl_offload.units import format_bytes


@dataclass(frozen=True, slots=True)
class TierLimit:
    """The nodes of a tier, and the most that a run may put there.

    Parameters
    ----------
    name
        How policies call it.
    nodes
        Its kernel node ids, fastest first; no node is in two tiers.
    capacity_bytes
        The most this run may put there; ``None`` leaves only what the nodes have.
    """

    name: str
    nodes: tuple[int, ...]
    capacity_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """``count`` allocations of ``nbytes`` each for one part of a kind."""

    kind: str
    part: str
    policy: Policy
    nbytes: int
    count: int


def striped(policy: Policy) -> tuple[Mapping[int, int], int] | None:
    """Weights and granule of a policy that stripes; None for another."""
    if isinstance(policy, Interleave):
        return dict.fromkeys(policy.nodes, 1), policy.granule_bytes
    if isinstance(policy, Weighted):
        return policy.weights, policy.granule_bytes
    return None


class Room:
    """What nodes and tiers have left while needs are laid into them in order.

    Parameters
    ----------
    node_free
        Bytes that can still be allocated on every usable node.
    limits
        Tiers with limits.
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
        self.nodes: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self.tiers: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def put(self, need: Need) -> None:
        """Lay a need out; what fits nowhere counts against the last node of its policy."""
        if isinstance(need.policy, Dax):
            return  # no node: the device itself refuses what it has no room for
        if isinstance(need.policy, Replicate):
            for node in need.policy.nodes:
                self._take(need.kind, node, need.nbytes * need.count)
            return
        stripe = striped(need.policy)
        if stripe is None:
            self._fill(need)
            return
        for node, nbytes in stripe_bytes(need.nbytes, *stripe).items():
            self._take(need.kind, node, nbytes * need.count)

    def _take(self, kind: str, node: int, nbytes: int) -> None:
        if nbytes == 0:
            return
        self.nodes[node][kind] += nbytes
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
        left = self.node_free.get(node, 0) - self.nodes[node].total()
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
    for node, kinds in room.nodes.items():
        free = room.node_free.get(node, 0)
        if kinds.total() > free:
            raise MemoryError(
                f"node {node}: {format_bytes(kinds.total())} needed ({_by_kind(kinds)}), "
                f"{format_bytes(free)} free; place less there"
            )
    return {node: kinds.total() for node, kinds in room.nodes.items() if kinds}


def _by_kind(kinds: Mapping[str, int]) -> str:
    return " + ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in kinds.items())


def tier_limits(machine: Machine, limits: Mapping[str, int]) -> tuple[TierLimit, ...]:
    """What ``--limit TIER=SIZE`` means on a machine.

    Raises
    ------
    ValueError
        The machine has no such tier.
    """
    return tuple(TierLimit(name, machine.tier(name).nodes, most) for name, most in limits.items())


def node_limits(limits: Sequence[TierLimit]) -> dict[int, int]:
    """What tiers of one node may hold, as the memory session takes it.

    With it a preferred node spills at the tier's capacity. Tiers of several nodes are left to the
    check before the run: the session counts nodes, not tiers.
    """
    return {
        limit.nodes[0]: limit.capacity_bytes
        for limit in limits
        if len(limit.nodes) == 1 and limit.capacity_bytes is not None
    }


def session_on(machine: Machine | None, limits: Sequence[TierLimit] = ()) -> Session:
    """A session held to limits: on the simulated nodes of a machine, or on this machine's.

    Parameters
    ----------
    machine
        A simulated one; or this one, whose tiers the caller may have named. None reads this one.
    """
    most = node_limits(limits)
    if machine is None or not machine.simulated:
        return Session.linux(machine, limits=most)
    return Session.simulated(machine, limits=most)


def room(session: Session, limits: Sequence[TierLimit] = ()) -> Room:
    """What the session's nodes can still take.

    Of a real node that is all its memory less what the session holds: page cache makes the free
    part look smaller than it is, and the kernel gives it up.
    """
    held = session.stats().nodes
    free: dict[int, int] = {}
    for node in session.machine.usable_nodes(include_gpu_memory=True):
        use = held.get(node.id)
        taken = 0 if use is None else use.current_bytes
        left = session.free_bytes(node.id) if session.is_simulated else node.capacity_bytes - taken
        if use is not None and use.capacity_bytes is not None:
            left = min(left, use.capacity_bytes - taken)
        free[node.id] = left
    return Room(free, limits, session.kernel.local_node)


__getattr__ = old_names(__name__)
