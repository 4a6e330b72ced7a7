"""The options of ``kv_connector_extra_config``, read and checked without vLLM or a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, cast

from cxl_offload.errors import ConfigError
from cxl_offload.memory import (
    Bind,
    Dax,
    FirstTouch,
    Memory,
    Pages,
    Policy,
    Preferred,
    Weighted,
    as_policy,
    parse_policy,
)
from cxl_offload.memory.shared import SHARED_ROOT
from cxl_offload.plan.stripe import stripe_bytes
from cxl_offload.topology import Machine
from cxl_offload.units import format_bytes, parse_bytes

__all__ = ["EVICTION_POLICIES", "KvOptions", "KvTier", "read_bytes", "read_placement"]

EVICTION_POLICIES = ("lru", "arc")
"""vLLM's own."""

_KINDS = ("bind", "preferred", "interleave", "weighted")
_PLACE_KEYS = ("policy", "nodes", "weights", "granule", "pages")
_OWN_KEYS = (*_PLACE_KEYS, "copy_threads")
# What vLLM 0.32 reads from the same mapping.
_VLLM_KEYS = (
    "spec_name",
    "spec_module_path",
    "cpu_bytes_to_use",
    "block_size",
    "blocks_per_chunk",
    "eviction_policy",
    "cache_policy_module_path",
    "store_threshold",
    "max_tracker_size",
    "offload_prompt_only",
    "self_describing_kv_events",
    "canonical_layout",
)


@dataclass(frozen=True, slots=True)
class KvTier:
    """One tier of the pool.

    Attributes
    ----------
    nbytes
        For all ranks together.
    policy
        Where its pages go; None puts each rank's part near the device of that rank.
    pages
        Of the memory: ``"base"``, or ``"thp"`` where the kernel has them.
    eviction
        Name of the policy that chooses what goes when it is full.
    """

    nbytes: int
    policy: Policy | None
    pages: Pages
    eviction: str


@dataclass(frozen=True, slots=True)
class KvOptions:
    """What somebody asked for in ``kv_connector_extra_config``.

    Attributes
    ----------
    hot
        The tier that KV blocks are stored to and loaded from.
    copy_threads
        Threads at most that copy in each direction; None takes all CPUs of the process that are
        near. Only where vLLM runs on CPU: a GPU copies by itself.
    """

    hot: KvTier
    copy_threads: int | None

    @classmethod
    def read(cls, config: Mapping[str, Any], machine: Machine) -> KvOptions:
        """The options in ``kv_connector_extra_config``, for this machine.

        Raises
        ------
        ConfigError
            With one line that names the option, its value and what would be right.
        """
        _check_names(config, (*_OWN_KEYS, *_VLLM_KEYS), "")
        nbytes = config.get("cpu_bytes_to_use")
        if nbytes is None:
            raise _wrong(
                "cpu_bytes_to_use", "is missing; give the bytes of the pool, for all ranks together"
            )
        hot = KvTier(
            nbytes=read_bytes("cpu_bytes_to_use", nbytes),
            policy=read_placement(config, machine),
            pages=_read_pages(config.get("pages", "base")),
            eviction=_read_eviction(config),
        )
        return cls(hot=hot, copy_threads=_read_count("copy_threads", config.get("copy_threads")))

    def check(self, memory: Memory, *, shared_free_bytes: int) -> None:
        """Whether the machine has the nodes and, at this moment, the room.

        Parameters
        ----------
        shared_free_bytes
            Of :func:`~cxl_offload.memory.shared.shared_free_bytes`: the hot tier is shared memory.

        Raises
        ------
        ConfigError
            With one line that names the option and what there is.
        """
        if self.hot.nbytes > shared_free_bytes:
            raise _wrong(
                "cpu_bytes_to_use",
                f"is {format_bytes(self.hot.nbytes)} and {SHARED_ROOT} has "
                f"{format_bytes(shared_free_bytes)} left; ask for less, or mount it larger (in a "
                "container: --shm-size)",
            )
        _check_tier(self.hot, memory)


def _check_tier(tier: KvTier, memory: Memory) -> None:
    policy = tier.policy
    if policy is None or isinstance(policy, FirstTouch | Dax):
        return
    usable = memory.kernel.allowed_nodes
    for node in policy.nodes:
        if node not in usable:
            raise _wrong(
                "policy",
                f"is {policy}: node {node} has no memory that this process may use; usable nodes "
                f"are {', '.join(map(str, usable))}",
            )
    free = {node: memory.free_bytes(node) for node in policy.nodes}
    if isinstance(policy, Preferred):
        return
    if isinstance(policy, Bind):
        needs = {"/".join(map(str, policy.nodes)): (tier.nbytes, sum(free.values()))}
    else:
        weights = policy.weights if isinstance(policy, Weighted) else dict.fromkeys(policy.nodes, 1)
        shares = stripe_bytes(tier.nbytes, weights, policy.granule_bytes)
        needs = {str(node): (shares.get(node, 0), free[node]) for node in policy.nodes}
    for name, (wanted, there) in needs.items():
        if wanted > there:
            raise _wrong(
                "policy",
                f"is {policy}: {format_bytes(wanted)} would go to node {name}, which has "
                f"{format_bytes(there)} free; ask for less, or for more nodes",
            )


def _read_eviction(config: Mapping[str, Any]) -> str:
    name = config.get("eviction_policy", "lru")
    if name not in EVICTION_POLICIES and "cache_policy_module_path" not in config:
        raise _wrong(
            "eviction_policy",
            f"is {name!r}; known are {', '.join(EVICTION_POLICIES)}, and others by "
            "cache_policy_module_path",
        )
    return str(name)


def _wrong(name: str, problem: str) -> ConfigError:
    return ConfigError(f"kv_connector_extra_config: {name} {problem}")


def _check_names(config: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in config:
        if name in known:
            continue
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        raise _wrong(f"{where}{name}", f"is no option; {hint}")


def read_bytes(name: str, value: Any) -> int:
    """A positive number of bytes, given as a number or as a text such as ``"8GiB"``."""
    try:
        nbytes = parse_bytes(value) if isinstance(value, str) else int(value)
    except (TypeError, ValueError, OverflowError):
        nbytes = 0
    if nbytes < 1 or isinstance(value, bool):
        raise _wrong(name, f"is {value!r}; give bytes, such as 8589934592 or '8GiB'")
    return nbytes


def _read_count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(name, f"is {value!r}; give a whole number from 1")
    return value


def _read_pages(value: Any) -> Pages:
    if value not in ("base", "thp"):
        raise _wrong("pages", f"is {value!r}; shared memory has 'base' and 'thp'")
    return cast("Pages", value)


def read_placement(config: Mapping[str, Any], machine: Machine, where: str = "") -> Policy | None:
    """The policy that ``policy``, ``nodes``, ``weights`` and ``granule`` mean together.

    Either ``policy`` says it all (``"weighted:0=4,2=1"``, ``{0: 4, 2: 1}``, the name of a tier), or
    it is a kind and ``nodes`` (ids or names of tiers) and ``weights`` are lists. ``nodes`` alone
    bind to one node and interleave over several. None stands for ``"near"``, also the default.
    """
    policy, nodes = config.get("policy"), config.get("nodes")
    try:
        if nodes is None and policy in _KINDS:
            raise ValueError(f"{policy!r} needs nodes, such as nodes: [0, 2]")
        if nodes is None and ("weights" in config or "granule" in config):
            raise ValueError("weights and granule need nodes, such as nodes: [0, 2]")
        if nodes is None:
            return None if policy in (None, "near") else _whole_policy(policy, machine)
        return parse_policy(_text_of(policy, nodes, config), machine)
    except (TypeError, ValueError) as error:
        raise _wrong(f"{where}policy", f"is wrong: {error}") from error


def _whole_policy(policy: Any, machine: Machine) -> Policy:
    if isinstance(policy, Mapping):  # JSON has text keys only
        policy = {int(node): weight for node, weight in policy.items()}
    return as_policy(policy, machine)


def _text_of(policy: Any, nodes: Any, config: Mapping[str, Any]) -> str:
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
        if not isinstance(weights, Sequence) or len(weights) != len(nodes):
            raise ValueError(f"weighted over {len(nodes)} nodes needs as many weights, in order")
        parts = [f"{node}={weight}" for node, weight in zip(parts, weights, strict=True)]
    elif weights is not None:
        raise ValueError(f"weights belong to 'weighted', not to {kind!r}")
    granule = f"@{config['granule']}" if "granule" in config else ""
    return f"{kind}:{','.join(parts)}{granule}"
