"""Policies: rules that say on which NUMA nodes the pages of a tensor live.

A policy names nodes by their kernel id. Text and mappings, as users write them, become policies by
:func:`parse_policy` and :func:`as_policy`, where names of tiers stand for their nodes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from cxl_offload.core import BASE_PAGE_BYTES, HUGE_PAGE_BYTES
from cxl_offload.memory.bandwidth_weights import weights_by_bandwidth
from cxl_offload.memory.bounds import quoted
from cxl_offload.renamed import old_names, renamed_keywords
from cxl_offload.topology import Machine
from cxl_offload.topology.model import MAX_WEIGHT, TIER_NAMES
from cxl_offload.units import format_bytes, parse_bytes

DEFAULT_GRANULE_BYTES = HUGE_PAGE_BYTES
"""Below the size of a transparent huge page, collapsing would destroy a stripe."""

_MAX_NODE = (1 << 20) - 1  # far above any kernel's
_MAX_DIGITS = 9
DAX_NAME = re.compile(r"dax[0-9]+\.[0-9]+")

MAX_GRANULE_BYTES = 1 << 61
"""A cycle of two such granules is all that sizes of memory are counted in."""


def _check_nodes(nodes: tuple[int, ...]) -> None:
    if not nodes:
        raise ValueError("a policy needs at least one node")
    for node in nodes:
        if isinstance(node, bool) or not isinstance(node, int) or not 0 <= node <= _MAX_NODE:
            raise ValueError(
                f"{quoted(node)} is not a node id; node ids are integers 0..{_MAX_NODE}"
            )
    if len(set(nodes)) != len(nodes):
        raise ValueError(f"nodes {list(nodes)} name a node twice")


def _check_granule(granule_bytes: int) -> None:
    if granule_bytes < 1:
        raise ValueError(f"a granule of {granule_bytes} bytes; give at least one page")
    if granule_bytes > MAX_GRANULE_BYTES:
        raise ValueError(f"a granule of {granule_bytes} bytes: no memory is so large")
    if granule_bytes % BASE_PAGE_BYTES:
        raise ValueError(
            f"a granule of {granule_bytes} bytes; give a multiple of a page, such as "
            f"{format_bytes(BASE_PAGE_BYTES)}"
        )


def _names(nodes: Iterable[int]) -> str:
    return ",".join(str(node) for node in nodes)


@dataclass(frozen=True, slots=True)
class FirstTouch:
    """Every page on the node of the thread that writes it first. Nothing is faulted in ahead."""

    def __str__(self) -> str:
        return "first-touch"


@dataclass(frozen=True, slots=True)
class Bind:
    """Only these nodes: each is filled in order, and a lack of room is an error."""

    nodes: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_nodes(self.nodes)

    def __str__(self) -> str:
        return f"bind:{_names(self.nodes)}"


@dataclass(frozen=True, slots=True)
class Preferred:
    """These nodes in order, then any other node, nearest first; what spilled is reported."""

    nodes: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_nodes(self.nodes)

    def __str__(self) -> str:
        return f"preferred:{_names(self.nodes)}"


@dataclass(frozen=True, slots=True)
class Weighted:
    """Granules in cycles over nodes, as many in a row on each node as its weight says.

    Parameters
    ----------
    weights
        Node id to weight, 1 to 255. Nodes keep their order.
    granule_bytes
        Bytes that stay together; a multiple of the page. An allocation smaller than the granule
        times the sum of the weights goes to the node of the largest weight, and says so.
    """

    weights: Mapping[int, int]
    granule_bytes: int = field(default=DEFAULT_GRANULE_BYTES, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.weights, Mapping):
            raise TypeError(f"weights {quoted(self.weights)} are no {{node: weight}}")
        _check_nodes(tuple(self.weights))
        for node, weight in self.weights.items():
            if isinstance(weight, bool) or not isinstance(weight, int):
                text = "not a number" if isinstance(weight, float) and math.isnan(weight) else ""
                raise ValueError(
                    f"weight {quoted(weight)} of node {node} is {text or 'not an integer'}"
                )
            if not 1 <= weight <= MAX_WEIGHT:
                raise ValueError(
                    f"weight {weight} of node {node} is outside 1..{MAX_WEIGHT}; "
                    "leave a node out to give it nothing"
                )
        _check_granule(self.granule_bytes)
        object.__setattr__(self, "weights", dict(self.weights))

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(self.weights)

    def __hash__(self) -> int:
        return hash((tuple(self.weights.items()), self.granule_bytes))

    def __str__(self) -> str:
        shares = ",".join(f"{node}={weight}" for node, weight in self.weights.items())
        return f"weighted:{shares}{_granule_suffix(self.granule_bytes)}"


@dataclass(frozen=True, slots=True)
class Interleave:
    """Granules round-robin over nodes: :class:`Weighted` with equal weights."""

    nodes: tuple[int, ...]
    granule_bytes: int = field(default=DEFAULT_GRANULE_BYTES, kw_only=True)

    def __post_init__(self) -> None:
        _check_nodes(self.nodes)
        _check_granule(self.granule_bytes)

    def __str__(self) -> str:
        return f"interleave:{_names(self.nodes)}{_granule_suffix(self.granule_bytes)}"


@dataclass(frozen=True, slots=True)
class Replicate:
    """A whole copy on each of these nodes, so that the threads of every socket read a near one.

    For weights, which many read and nobody writes: ordinary torch code reads and writes the copy
    on the first node, :func:`cxl_offload.ops.linear.linear` reads the copy near each thread, and
    :func:`cxl_offload.tensor.write_copies` writes all of them. Each node is charged all bytes.
    """

    nodes: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_nodes(self.nodes)
        if len(self.nodes) < 2:
            raise ValueError(
                f"{self}: copies are on two nodes or more; bind:{_names(self.nodes)} is one copy"
            )

    def __str__(self) -> str:
        return f"replicate:{_names(self.nodes)}"


@dataclass(frozen=True, slots=True)
class Dax:
    """A Device-DAX device in mode ``devdax``, e.g. ``"dax0.0"``: memory that is no NUMA node.

    The kernel neither moves it, swaps it, nor gives it to anyone else, and pinning leaves it where
    it is. Its pages are as large as the device's alignment (mostly 2 MiB); allocations share them.
    A session claims the whole device when it first allocates there and keeps it, so one session of
    one process uses a device at a time; another is refused. The claim is a file lock: programs
    that do not take it, and containers with a device file of their own, are not kept out.

    Bytes are what was last written there, by an earlier process too: fill what you read. The
    mapping is shared with forked children, so that what a child writes the parent sees.
    Long-term pins of it were tested on an emulated CXL device (with io_uring); registering it with
    a GPU driver was not.
    """

    device: str

    def __post_init__(self) -> None:
        if not isinstance(self.device, str) or not DAX_NAME.fullmatch(self.device):
            raise ValueError(
                f"{quoted(self.device)} is no Device-DAX device; they are named dax0.0"
            )

    def __str__(self) -> str:
        return f"dax:{self.device}"


Policy: TypeAlias = FirstTouch | Bind | Preferred | Interleave | Weighted | Replicate | Dax
PolicyLike: TypeAlias = Policy | Mapping[int, int] | str


def _granule_suffix(granule_bytes: int) -> str:
    if granule_bytes == DEFAULT_GRANULE_BYTES:
        return ""
    exact = format_bytes(granule_bytes)
    text = exact if _is_exact(exact, granule_bytes) else f"{granule_bytes} B"
    return "@" + text.replace(" ", "")


def _is_exact(text: str, count: int) -> bool:
    try:
        return parse_bytes(text) == count
    except ValueError:
        return False


def _nodes_of(name: str, machine: Machine | None) -> tuple[int, ...]:
    """The nodes that a node id or the name of a tier stands for."""
    name = name.strip()
    if name.isdecimal() and len(name) <= _MAX_DIGITS:
        return (int(name),)
    tiers = {} if machine is None else {tier.name: tier.nodes for tier in machine.tiers}
    if name not in tiers:
        known = ", ".join(tiers) if tiers else "none on this machine"
        if name in TIER_NAMES:
            raise ValueError(
                f"{quoted(name)} is neither a node id nor a tier of this machine, which has: "
                f"{known} (simulated machines have others: --machine epyc9354-cxl-a, in Python "
                'load_machine("epyc9354-cxl-a"))'
            )
        raise ValueError(f"{quoted(name)} is neither a node id nor a tier; tiers: {known}")
    if not tiers[name]:
        raise ValueError(f"tier {name!r} has no NUMA node on this machine")
    return tiers[name]


def _node_list(text: str, machine: Machine | None) -> tuple[int, ...]:
    return tuple(node for name in text.split(",") for node in _nodes_of(name, machine))


def _weights(text: str, machine: Machine | None) -> dict[int, int]:
    if "=" not in text and machine is not None:
        parts = {name.strip(): _nodes_of(name, machine) for name in text.split(",")}
        given = [node for each in parts.values() for node in each]
        if len(set(given)) < len(given) or len(parts) <= text.count(","):
            raise ValueError(f"{quoted(text)} names a node a second time")
        return weights_by_bandwidth(parts, machine)
    weights: dict[int, int] = {}
    for part in text.split(","):
        name, equals, weight = part.partition("=")
        if not equals:
            raise ValueError(f"{quoted(part)} gives no weight; write NODE=WEIGHT, e.g. 0=4,2=1")
        nodes = _nodes_of(name, machine)
        try:
            value = int(weight)
        except ValueError:
            raise ValueError(
                f"weight {quoted(weight)} of {quoted(name)} is not an integer"
            ) from None
        for node in nodes:
            if node in weights:
                raise ValueError(f"{quoted(text)} gives node {node} two weights")
            weights[node] = value
    return weights


def parse_policy(text: str, machine: Machine | None = None) -> Policy:
    """A policy from its text form.

    Parameters
    ----------
    text
        ``first-touch``, ``bind:0``, ``preferred:0,2``, ``interleave:0,2`` or
        ``weighted:0=4,2=1``; the last two may end in a granule such as ``@64KiB``.
        ``replicate:0,1`` is a copy on each node, ``dax:dax0.0`` a Device-DAX device. The name of a
        tier may stand wherever a node id may. A tier's name alone means that tier: its node, or an
        interleave over its nodes. ``weighted:0,2`` takes the weights from the bandwidths that the
        machine's firmware or file says.
    machine
        Whose tiers the names mean.

    Raises
    ------
    ValueError
        When the text is not a policy; the message says what is known.
    """
    body, at, granule = text.strip().partition("@")
    kind, colon, rest = body.partition(":")
    if at and kind not in ("interleave", "weighted"):
        raise ValueError(f"{quoted(text)}: only interleave and weighted have a granule")
    granule_bytes = parse_bytes(granule) if at else DEFAULT_GRANULE_BYTES
    if not colon and kind == "first-touch":
        return FirstTouch()
    if not colon:
        nodes = _nodes_of(kind, machine)
        return Bind(nodes) if len(nodes) == 1 else Interleave(nodes)
    if kind == "bind":
        return Bind(_node_list(rest, machine))
    if kind == "preferred":
        return Preferred(_node_list(rest, machine))
    if kind == "interleave":
        return Interleave(_node_list(rest, machine), granule_bytes=granule_bytes)
    if kind == "weighted":
        return Weighted(_weights(rest, machine), granule_bytes=granule_bytes)
    if kind == "replicate":
        return Replicate(_node_list(rest, machine))
    if kind == "dax":
        return Dax(rest)
    raise ValueError(
        f"{quoted(text)} is not a policy; write first-touch, bind:N, preferred:N,M, "
        "interleave:N,M, weighted:N=4,M=1, replicate:N,M, dax:daxX.Y or the name of a tier"
    )


@renamed_keywords(placement="policy")
def as_policy(policy: PolicyLike, machine: Machine | None = None) -> Policy:
    """The policy that ``policy`` means: a policy, ``{node: weight}`` or a text.

    Raises
    ------
    ValueError
        As :func:`parse_policy`, and for mappings with weights that are not integers 1..255.
    TypeError
        For anything else.
    """
    if isinstance(policy, str):
        return parse_policy(policy, machine)
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, Mapping):
        if len(policy) == 1:
            (node,) = Weighted(policy).nodes
            return Bind((node,))
        return Weighted(policy)
    raise TypeError(
        f"{quoted(policy)} is no policy: give one of the classes of cxl_offload.memory, "
        "{node: weight} or a text such as 'bind:0'"
    )


__getattr__ = old_names(__name__)


def refuse_copies(policy: Policy, what: str) -> None:
    """Raises ValueError for :class:`Replicate` of ``what``, in words: copies would lie idle, or
    differ once it is written in place."""
    if isinstance(policy, Replicate):
        raise ValueError(
            f"{policy}: {what} cannot have copies; only weights can that this package's linear "
            "layers read; bind or interleave it"
        )


def known_policy(policy: PolicyLike, machine: Machine, what: str = "this memory") -> Policy:
    """The policy that ``policy`` means, for nodes and devices that this process has here.

    What a later allocation would refuse for its name is refused now; whether there is room is seen
    only then.

    Raises
    ------
    ValueError, TypeError
        As :func:`as_policy`; a node without memory for this process, a device that is not there;
        copies of ``what``, see :func:`refuse_copies`.
    """
    found = as_policy(policy, machine)
    refuse_copies(found, what)
    if isinstance(found, FirstTouch):
        return found
    if isinstance(found, Dax):
        devices = [device.name for device in machine.dax if device.mode == "devdax"]
        if found.device not in devices:
            raise ValueError(
                f"{found}: no such device in mode devdax; there are: {', '.join(devices) or 'none'}"
            )
        return found
    usable = [node.id for node in machine.nodes if node.has_memory and node.allowed]
    for node in found.nodes:
        if node not in usable:
            raise ValueError(
                f"{found}: node {node} has no memory that this process may use; usable nodes are "
                f"{_names(usable)}"
            )
    return found
