"""Policies as lists of nodes, which vLLM's options took before: read for one more version."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from cxl_offload.memory import Bind, Policy, as_policy, parse_policy
from cxl_offload.topology import Machine

LISTED = ("bind", "preferred", "interleave", "weighted")
"""Kinds of policy that took a list of nodes."""


def policy_text(
    kind: str, nodes: Any, *, weights: Any = None, granule: str | None = None, name: str = "nodes"
) -> str:
    """The text of a policy of that kind over a list of nodes or tiers.

    Raises
    ------
    ValueError
        The lists do not go together; calls them by ``name``.
    """
    if isinstance(nodes, str) or not isinstance(nodes, Sequence) or not nodes:
        raise ValueError(f"{name} is {nodes!r}; give a list, such as [0, 2]")
    if any(isinstance(node, bool) or not isinstance(node, int | str) for node in nodes):
        raise ValueError(f"{name} is {nodes!r}; give ids of nodes or names of tiers")
    parts = [str(node) for node in nodes]
    if weights is not None:
        if kind != "weighted":
            raise ValueError(f"weights belong to 'weighted', not to {kind!r}")
        if not isinstance(weights, Sequence) or len(weights) != len(nodes):
            raise ValueError(f"weighted over {len(nodes)} nodes needs as many weights, in order")
        parts = [f"{node}={weight}" for node, weight in zip(parts, weights, strict=True)]
    return f"{kind}:{','.join(parts)}" + ("" if granule is None else f"@{granule}")


def warn_of_old(where: str, old: Sequence[str], new: str, text: str) -> None:
    """Says what to write instead; shown, unlike warnings for programmers."""
    warnings.warn(
        f"{where}: {', '.join(old)} is now {new} {text!r}; the old option goes with the next "
        "version",
        FutureWarning,
        stacklevel=2,
    )


def whole_policy(policy: Any, machine: Machine) -> Policy:
    """A policy as text, or as a mapping of a document, whose keys are texts.

    Raises
    ------
    ValueError, TypeError
        As :func:`cxl_offload.memory.as_policy`; a node with two weights.
    """
    if not isinstance(policy, Mapping):
        return as_policy(policy, machine)
    weights: dict[int, int] = {}
    for name, weight in policy.items():  # ids, or names of tiers
        tier = parse_policy(f"bind:{name}", machine)
        assert isinstance(tier, Bind)
        for node in tier.nodes:
            if node in weights:
                raise ValueError(f"{name!r} gives node {node} a second weight")
            weights[node] = weight
    return as_policy(weights, machine)
