"""The two tiers of a machine between which a tuner shares the bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cxl_offload.errors import ConfigError
from cxl_offload.memory import Bind, Policy, Weighted
from cxl_offload.memory.bounds import quoted
from cxl_offload.memory.policy import DEFAULT_GRANULE_BYTES
from cxl_offload.topology import Machine
from cxl_offload.tune.decision import weights_of_share

_FAR = ("cxl", "rdram")
"""Second tiers, the usual one first."""


def check_tiers(near: Sequence[int], far: Sequence[int]) -> None:
    """Refuses nodes that are no two tiers.

    Raises
    ------
    TypeError
        No sequence of nodes.
    ValueError
        No node, or one that is in both.
    """
    for nodes in (near, far):
        if not isinstance(nodes, Iterable):
            raise TypeError(f"nodes {quoted(nodes)} of a tier: need a list, such as [0]")
    if not near or not far or set(near) & set(far):
        raise ValueError(
            f"near nodes {list(near)}, far nodes {list(far)}: need some of each, none in both"
        )


def near_and_far(
    machine: Machine, *, near: str = "ldram", far: str | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Nodes of the near tier and of the far one.

    Parameters
    ----------
    near, far
        Names of tiers. By default ``far`` is CXL memory or, without any, DRAM of the other sockets.

    Raises
    ------
    ConfigError
        The machine has no such tier, or only one.
    """
    nodes = {tier.name: tier.nodes for tier in machine.tiers if tier.nodes}
    second = far if far is not None else next((name for name in _FAR if name in nodes), None)
    if near not in nodes or second not in nodes or near == second:
        have = ", ".join(nodes) or "none"
        raise ConfigError(
            f"tune: machine {machine.name} has the tiers {have}; tuning needs a near one "
            f"({near}) and a far one ({second or ' or '.join(_FAR)})"
        )
    return nodes[near], nodes[second]


def tier_policy(
    near: Sequence[int],
    far: Sequence[int],
    share: float,
    *,
    granule_bytes: int = DEFAULT_GRANULE_BYTES,
) -> Policy:
    """The policy that puts ``share`` of the bytes on the far tier, evenly over its nodes."""
    of_near, of_far = weights_of_share(share)
    weights = {node: of_near * len(far) for node in near if of_near}
    weights |= {node: of_far * len(near) for node in far if of_far}
    if len(weights) == 1:
        return Bind(tuple(weights))
    return Weighted(weights, granule_bytes=granule_bytes)
