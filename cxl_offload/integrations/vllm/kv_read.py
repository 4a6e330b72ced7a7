"""Readers of single options of ``kv_connector_extra_config``; each error is one line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from cxl_offload.errors import ConfigError
from cxl_offload.files import hint
from cxl_offload.kept import kept_folder, kept_path
from cxl_offload.memory import Bind, Pages, Policy, as_policy, parse_policy
from cxl_offload.plan.equations.interleave import best_weights
from cxl_offload.topology import Machine
from cxl_offload.units import whole_bytes

_WEIGHTS_TOTAL = 12
"""Granules of a cycle, where weights follow from bandwidths."""

_KINDS = ("bind", "preferred", "interleave", "weighted")


FACTS_KEY = "kept_facts"
"""Not an option of people: what the check of the configuration hands to the scheduler's process."""


def wrong(name: str, problem: str) -> ConfigError:
    """The error for one option."""
    return ConfigError(f"kv_connector_extra_config: {name} {problem}")


def check_names(config: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Refuses names that mean nothing, with a guess at what was meant."""
    for name in config:
        if name not in known:
            raise wrong(f"{where}{name}", f"is no option; {hint(name, known)}")


def read_bytes(name: str, value: Any) -> int:
    """A positive number of bytes, given as a number or as a text such as ``"8GiB"``."""
    try:
        nbytes = whole_bytes(value)
    except ValueError:
        nbytes = 0
    if nbytes < 1:
        raise wrong(name, f"is {value!r}; give bytes, such as 8589934592 or '8GiB'")
    return nbytes


def read_count(name: str, value: Any) -> int | None:
    """A whole number from 1, or None where it is left out."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise wrong(name, f"is {value!r}; give a whole number from 1")
    return value


def read_rate(value: Any) -> float | None:
    """Tokens a second, or None where they are left out."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise wrong("prefill_tokens_per_s", f"is {value!r}; give tokens a second, above 0")
    return float(value)


def read_tune_state(config: Mapping[str, Any]) -> Path | None:
    """The file that ``tune`` learns in; None without it."""
    tune, state = config.get("tune"), config.get("tune_state")
    if tune is None and state is None:
        return None
    if tune != "copy_time":
        raise wrong("tune", f"is {tune!r}; give 'copy_time', or leave tune_state out too")
    if not isinstance(state, str) or not state:
        raise wrong(
            "tune_state",
            f"is {state!r}; give a file: the pool does not move, so what is learned counts from "
            "the next start on",
        )
    return Path(state).expanduser()


def read_pages(name: str, value: Any, known: Sequence[str]) -> Pages:
    """One of the ``known`` kinds of pages."""
    if value not in known:
        raise wrong(name, f"is {value!r}; known here are {', '.join(known)}")
    return cast("Pages", value)


def read_placement(config: Mapping[str, Any], machine: Machine, where: str = "") -> Policy | None:
    """The policy that ``policy``, ``nodes``, ``weights`` and ``granule`` mean together.

    Either ``policy`` says it all (``"weighted:0=4,2=1"``, ``{0: 4, 2: 1}``, the name of a tier), or
    it is a kind, and ``nodes`` (ids or names of tiers) and ``weights`` are lists; ``weighted``
    without weights takes them from the bandwidths that the machine's firmware tells. ``nodes``
    alone bind to one node and interleave over several. None is ``"near"``, also the default.
    """
    policy, nodes = config.get("policy"), config.get("nodes")
    try:
        if nodes is None and policy in _KINDS:
            raise ValueError(f"{policy!r} needs nodes, such as nodes: [0, 2]")
        if nodes is None and ("weights" in config or "granule" in config):
            raise ValueError("weights and granule need nodes, such as nodes: [0, 2]")
        if nodes is None:
            return None if policy in (None, "near") else _whole_policy(policy, machine)
        return _listed_policy(policy, nodes, config, machine)
    except (TypeError, ValueError) as error:
        raise wrong(f"{where}policy", f"is wrong: {error}") from error


def _whole_policy(policy: Any, machine: Machine) -> Policy:
    if not isinstance(policy, Mapping):
        return as_policy(policy, machine)
    weights: dict[int, int] = {}
    for name, weight in policy.items():  # JSON has text keys only: ids, or names of tiers
        for node in _nodes_of(str(name), machine):
            if node in weights:
                raise ValueError(f"{name!r} gives node {node} a second weight")
            weights[node] = weight
    return as_policy(weights, machine)


def _nodes_of(name: str, machine: Machine) -> tuple[int, ...]:
    """The nodes that an id or the name of a tier stands for."""
    policy = parse_policy(f"bind:{name}", machine)
    assert isinstance(policy, Bind)
    return policy.nodes


def _listed_policy(policy: Any, nodes: Any, config: Mapping[str, Any], machine: Machine) -> Policy:
    if isinstance(nodes, str) or not isinstance(nodes, Sequence) or not nodes:
        raise ValueError(f"nodes is {nodes!r}; give a list, such as [0, 2]")
    kind = policy if policy is not None else "bind" if len(nodes) == 1 else "interleave"
    if kind not in _KINDS:
        raise ValueError(
            f"{kind!r} with nodes; leave nodes out, or give one of {', '.join(_KINDS)}"
        )
    parts = [str(node) for node in nodes]
    weights = config.get("weights")
    if kind == "weighted":
        if weights is None:
            weights = _weights_by_bandwidth(parts, machine)
        if not isinstance(weights, Sequence) or len(weights) != len(nodes):
            raise ValueError(f"weighted over {len(nodes)} nodes needs as many weights, in order")
        parts = [f"{node}={weight}" for node, weight in zip(parts, weights, strict=True)]
    elif weights is not None:
        raise ValueError(f"weights belong to 'weighted', not to {kind!r}")
    granule = f"@{config['granule']}" if "granule" in config else ""
    return parse_policy(f"{kind}:{','.join(parts)}{granule}", machine)


def _weights_by_bandwidth(parts: Sequence[str], machine: Machine) -> tuple[int, ...]:
    """By what the machine's firmware (HMAT) or file says of reading each node or tier."""
    rates = []
    for part in parts:
        nodes = _nodes_of(part, machine)
        known = [
            max(
                access.read_bandwidth_bytes_per_s or 0.0
                for access in machine.accesses
                if access.target == node
            )
            for node in nodes
            if any(access.target == node for access in machine.accesses)
        ]
        if len(known) < len(nodes) or not all(known):
            raise ValueError(
                f"the bandwidth of {part} is not known here; give weights, such as weights: [4, 1]"
            )
        rates.append(min(known))
    # Enough for 4:1 and 3:1 alike; a node of less than a thirteenth of the rest is not worth it.
    weights = best_weights(rates, total=_WEIGHTS_TOTAL)
    if min(weights) == 0:
        raise ValueError(
            f"by bandwidth the weights of {', '.join(parts)} are {weights}; leave those of 0 out"
        )
    common = math.gcd(*weights)
    return tuple(weight // common for weight in weights)


def read_kept(config: Mapping[str, Any], where: str) -> Path | None:
    """The file of ``persist`` in ``persist_folder``, or the device that ``persist`` names.

    None where chunks end with the engine.
    """
    name, folder = config.get("persist"), config.get("persist_folder")
    if name is None:
        if folder is not None:
            raise wrong(f"{where}persist_folder", "does nothing without persist")
        return None
    if not isinstance(name, str):
        raise wrong(f"{where}persist", f"is {name!r}; give a name")
    try:
        root = kept_folder(folder)
    except ValueError:
        raise wrong(
            f"{where}persist_folder", f"is {folder!r}; give a folder that is there"
        ) from None
    try:
        return kept_path(name, root)
    except ValueError as error:
        raise wrong(f"{where}persist", f"is no name: {error}") from error
