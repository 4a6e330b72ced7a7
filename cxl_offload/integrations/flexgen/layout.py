"""Where every tensor of a run will lie, and whether the tiers can hold it, before any exists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flexgen.opt_config import OptConfig

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.flexgen.places import ROLES, Role, TierLimit, parse_split
from cxl_offload.integrations.flexgen.predict import Need
from cxl_offload.integrations.flexgen.request import FlexGenRun
from cxl_offload.integrations.flexgen.shares import (
    ACCELERATOR,
    DISK,
    HOST,
    HomeShares,
    ShareRow,
    WeightGroup,
    home_shares,
    kv_sequences,
    realised_kv,
    realised_weights,
    weight_homes,
)
from cxl_offload.integrations.flexgen.sizes import Sizes
from cxl_offload.integrations.flexgen.store import Part
from cxl_offload.memory.policy import Dax, FirstTouch, Policy, Preferred, parse_policy
from cxl_offload.topology import Machine, Tier

__all__ = ["Layout", "lay_out", "with_tiers"]


@dataclass(frozen=True, slots=True)
class Layout:
    """The plan of one run.

    Attributes
    ----------
    weights, kv
        Homes and requested percentages, disk first and accelerator last.
    sequences
        Sequences of one batch in every home of ``kv``.
    rows
        Requested against realised shares.
    parts
        Policies of every role on the host.
    needs
        Every host allocation.
    outside
        Bytes of weights and KV cache whose home is the accelerator or the disk, by home and role.
    accelerator_bytes
        The least the accelerator must hold: homes, the largest layer twice, and work buffers.
    notes
        Policies that have nothing to place.
    """

    weights: HomeShares
    kv: HomeShares
    sequences: tuple[int, ...]
    rows: tuple[ShareRow, ...]
    parts: Mapping[Role, tuple[Part, ...]]
    needs: tuple[Need, ...]
    outside: Mapping[str, Mapping[Role, int]]
    accelerator_bytes: int
    notes: tuple[str, ...]


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


def lay_out(
    run: FlexGenRun,
    config: OptConfig,
    groups: Sequence[WeightGroup],
    prompt_len: int,
    machine: Machine,
) -> Layout:
    """Decide every home and size.

    Parameters
    ----------
    run
        A checked request.
    config, groups
        The model and its weights as FlexGen shares them out.
    prompt_len
        Tokens of every padded prompt.
    machine
        Nodes and tiers that policies may name, tiers of the request included.

    Raises
    ------
    ConfigError
        Unknown tier or node, a share that would be nothing, prompts longer than the model allows.
    """
    if prompt_len + run.gen_len > config.max_seq_len:
        raise ConfigError(
            f"prompt of {prompt_len} and answer of {run.gen_len} tokens are longer than the "
            f"{config.max_seq_len} positions of {config.name}; shorten one of them"
        )
    weight_shares = home_shares(*run.percent[0:2], parse_split(run.place.get("weights", "")))
    kv_shares = home_shares(*run.percent[2:4], parse_split(run.place.get("kv", "")))
    rows = (
        *realised_weights(groups, weight_shares),
        *realised_kv(run.gpu_batch_size, kv_shares),
    )
    sequences = tuple(kv_sequences(run.gpu_batch_size, kv_shares))
    unplaced = _nearest(machine) if run.accelerator == "cuda" else FirstTouch()
    parts = {role: _parts(role, run.place.get(role), machine, unplaced) for role in ROLES}
    _refuse_idle_policies(run, weight_shares, kv_shares)
    sizes = Sizes(run, config, prompt_len)
    weights = _weight_needs(groups, weight_shares, sizes, parts["weights"])
    kv = _kv_needs(sequences, kv_shares, sizes, parts["kv"])
    host = (
        *weights.host,
        *kv.host,
        *sizes.workspace(parts["workspace"][0]),
        *sizes.activations(parts["act"][0]),
    )
    return Layout(
        weights=weight_shares,
        kv=kv_shares,
        sequences=sequences,
        rows=rows,
        parts=parts,
        needs=host,
        outside={
            ACCELERATOR: {"weights": weights.accelerator, "kv": kv.accelerator},
            DISK: {"weights": weights.disk, "kv": kv.disk},
        },
        accelerator_bytes=weights.accelerator + kv.accelerator + sizes.accelerator_work(groups),
        notes=tuple(_idle(role, run) for role in run.place if all(n.role != role for n in host)),
    )


def _nearest(machine: Machine) -> Policy:
    """What first touch comes to where memory is pinned, which touches it at once."""
    distances = machine.distances.get(machine.initiator, {})
    nodes = [node.id for node in machine.usable_nodes()]
    first = min(nodes, key=lambda node: (node != machine.initiator, distances.get(node, 255)))
    return Preferred((first,))


def _parts(role: Role, text: str | None, machine: Machine, unplaced: Policy) -> tuple[Part, ...]:
    if text is None:
        return (Part(HOST, unplaced),)
    try:
        split = parse_split(text)
        if split is None:
            parts: tuple[Part, ...] = (Part(HOST, parse_policy(text, machine)),)
        else:
            places = [part.place for part in split.parts]
            parts = tuple(Part(name, parse_policy(f"bind:{name}", machine)) for name in places)
    except ValueError as error:
        raise ConfigError(f"--place {role}={text}: {error}") from None
    if any(isinstance(part.policy, Dax) for part in parts):
        raise ConfigError(
            f"--place {role}={text}: what fits is worked out by node, and a device is none; name "
            "nodes, or make its memory one: daxctl reconfigure-device --mode=system-ram"
        )
    usable = {node.id for node in machine.usable_nodes(include_gpu_memory=True)}
    for part in parts:
        absent = [node for node in getattr(part.policy, "nodes", ()) if node not in usable]
        if absent:
            known = ", ".join(str(node) for node in sorted(usable))
            raise ConfigError(
                f"--place {role}={text}: node {absent[0]} has no memory that this process may use "
                f"on {machine.name}; usable nodes are {known}"
            )
    return parts


def _idle(role: str, run: FlexGenRun) -> str:
    why = "they are on the accelerator"
    if role == "workspace":
        why = (
            "attention reads the cache in place"
            if run.cpu_cache_compute
            else "no --cpu-cache-compute"
        )
    return f"--place {role}={run.place[role]}: nothing to place, {why}"


def _refuse_idle_policies(run: FlexGenRun, weights: HomeShares, kv: HomeShares) -> None:
    for role, shares in (("weights", weights), ("kv", kv)):
        if role in run.place and sum(shares.percents[1:-1]) == 0:
            raise ConfigError(
                f"--place {role}={run.place[role]}: --percent leaves 0 % of the {role} on the "
                f"host, so nothing would be placed; give the host a share or drop the policy"
            )


@dataclass(frozen=True, slots=True)
class _Homes:
    host: tuple[Need, ...]
    accelerator: int
    disk: int


def _weight_needs(
    groups: Sequence[WeightGroup], shares: HomeShares, sizes: Sizes, parts: tuple[Part, ...]
) -> _Homes:
    by_name = {part.name: part for part in parts}
    host: Counter[tuple[str, int]] = Counter()
    elsewhere: Counter[str] = Counter()
    for group in groups:
        homes = weight_homes(group.sizes, shares.percents)
        for shape, at in zip(group.shapes, homes, strict=True):
            home = shares.homes[at]
            nbytes = sizes.weight(shape)
            if home in (ACCELERATOR, DISK):
                elsewhere[home] += sum(nbytes)
            else:
                host.update((home, each) for each in nbytes)
    needs = _needs("weights", by_name, host)
    return _Homes(needs, elsewhere[ACCELERATOR], elsewhere[DISK])


def _kv_needs(
    sequences: Sequence[int], shares: HomeShares, sizes: Sizes, parts: tuple[Part, ...]
) -> _Homes:
    by_name = {part.name: part for part in parts}
    host: Counter[tuple[str, int]] = Counter()
    elsewhere: Counter[str] = Counter()
    for home, count in zip(shares.homes, sequences, strict=True):
        if count == 0:
            continue
        for nbytes in sizes.kv(count):
            if home in (ACCELERATOR, DISK):
                elsewhere[home] += nbytes * sizes.kv_tensors
            else:
                host[(home, nbytes)] += sizes.kv_tensors
    needs = _needs("kv", by_name, host)
    return _Homes(needs, elsewhere[ACCELERATOR], elsewhere[DISK])


def _needs(
    role: Role, parts: Mapping[str, Part], host: Mapping[tuple[str, int], int]
) -> tuple[Need, ...]:
    return tuple(
        Need(role, name, parts[name].policy, nbytes, count)
        for (name, nbytes), count in host.items()
    )
