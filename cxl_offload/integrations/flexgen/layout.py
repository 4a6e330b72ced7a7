"""Where every tensor of a run will lie, and whether the tiers can hold it, before any exists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from flexgen.opt_config import OptConfig

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.fit import Need
from cxl_offload.integrations.flexgen.homes import (
    FlexGenHomes,
    HostPart,
    asked_homes,
    planned_homes,
)
from cxl_offload.integrations.flexgen.places import KINDS, FlexGenKind
from cxl_offload.integrations.flexgen.request import FlexGenRun
from cxl_offload.integrations.flexgen.shares import ACCELERATOR, DISK, ShareRow
from cxl_offload.integrations.flexgen.sizes import RunSizes, tensor_sizes
from cxl_offload.memory.policy import (
    Dax,
    FirstTouch,
    Policy,
    Preferred,
    parse_policy,
    refuse_copies,
)
from cxl_offload.objects.kind_store import Part
from cxl_offload.plan.flexgen.layout import weight_homes
from cxl_offload.renamed import old_names
from cxl_offload.topology import Machine
from cxl_offload.topology.model import NO_PATH_DISTANCE


@dataclass(frozen=True, slots=True)
class FlexGenLayout:
    """Where the tensors of one run will lie.

    Attributes
    ----------
    homes
        Of weights and KV cache.
    rows
        Requested against realised shares.
    parts
        Policies of every kind on the host.
    needs
        Every host allocation.
    outside
        Bytes of weights and KV cache whose home is the accelerator or the disk, by home and kind.
    accelerator_bytes
        The least the accelerator must hold: homes, the largest layer twice, and work buffers.
    attends_in_place
        The CPU computes attention over the cache where it lies.
    notes
        Policies that have nothing to place.
    """

    homes: FlexGenHomes
    rows: tuple[ShareRow, ...]
    parts: Mapping[str, tuple[Part, ...]]
    needs: tuple[Need, ...]
    outside: Mapping[str, Mapping[FlexGenKind, int]]
    accelerator_bytes: int
    attends_in_place: bool
    notes: tuple[str, ...]


def lay_out(run: FlexGenRun, config: OptConfig, prompt_len: int, machine: Machine) -> FlexGenLayout:
    """Decide every home and size.

    Parameters
    ----------
    run
        A checked request.
    config
        The model.
    prompt_len
        Tokens of every padded prompt.
    machine
        Nodes and tiers that policies may name, tiers of the request included.

    Raises
    ------
    ConfigError
        Unknown tier or node, a share that would be nothing, a plan of another model, prompts longer
        than the model allows.
    """
    if prompt_len + run.gen_len > config.max_seq_len:
        raise ConfigError(
            f"prompt of {prompt_len} and answer of {run.gen_len} tokens are longer than the "
            f"{config.max_seq_len} positions of {config.name}; shorten one of them"
        )
    tensors = tensor_sizes(config, prompt_len=prompt_len, gen_len=run.gen_len)
    if run.plan is None:
        homes, rows = asked_homes(run, tensors)
    else:
        homes, rows = planned_homes(run.plan, tensors)
    unplaced = _nearest(machine) if run.accelerator == "cuda" else FirstTouch()
    parts: dict[str, tuple[Part, ...]] = {
        kind: _parts(kind, homes.host[kind], machine, unplaced) for kind in KINDS
    }
    sizes = RunSizes(run, homes, tensors)
    weights, weights_outside = _weight_needs(sizes, parts["weights"])
    kv, kv_outside = _kv_needs(sizes, parts["kv"])
    host = (
        *weights,
        *kv,
        *sizes.workspace(parts["workspace"][0]),
        *sizes.activations(parts["act"][0]),
    )
    held = weights_outside[ACCELERATOR] + kv_outside[ACCELERATOR]
    return FlexGenLayout(
        homes=homes,
        rows=rows,
        parts=parts,
        needs=host,
        outside={
            home: {"weights": weights_outside[home], "kv": kv_outside[home]}
            for home in (ACCELERATOR, DISK)
        },
        accelerator_bytes=held + sizes.accelerator_work(),
        attends_in_place=sizes.attends_in_place,
        notes=tuple(_idle(kind, run) for kind in run.place if all(n.kind != kind for n in host)),
    )


def _nearest(machine: Machine) -> Policy:
    """What first touch comes to where memory is pinned, which touches it at once."""
    distances = machine.distances.get(machine.initiator, {})
    nodes = [node.id for node in machine.usable_nodes()]
    first = min(
        nodes, key=lambda node: (node != machine.initiator, distances.get(node, NO_PATH_DISTANCE))
    )
    return Preferred((first,))


def _parts(
    kind: FlexGenKind, asked: tuple[HostPart, ...], machine: Machine, unplaced: Policy
) -> tuple[Part, ...]:
    usable = {node.id for node in machine.usable_nodes(include_gpu_memory=True)}
    made = []
    for part in asked:
        if part.policy is None:
            made.append(Part(part.name, unplaced))
            continue
        where = f"--place {kind}={part.policy}"
        try:
            policy = parse_policy(part.policy, machine)
            refuse_copies(policy, f"{kind} of FlexGen")
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        if isinstance(policy, Dax):
            raise ConfigError(
                f"{where}: what fits is worked out by node, and a device is none; name nodes, or "
                f"make its memory one: daxctl reconfigure-device --mode=system-ram"
            )
        absent = [node for node in getattr(policy, "nodes", ()) if node not in usable]
        if absent:
            known = ", ".join(str(node) for node in sorted(usable))
            raise ConfigError(
                f"{where}: node {absent[0]} has no memory that this process may use on "
                f"{machine.name}; usable nodes are {known}"
            )
        made.append(Part(part.name, policy))
    return tuple(made)


def _idle(kind: str, run: FlexGenRun) -> str:
    why = "they are on the accelerator"
    if kind == "workspace":
        why = (
            "attention reads the cache in place"
            if run.cpu_cache_compute
            else "no --cpu-cache-compute"
        )
    return f"--place {kind}={run.place[kind]}: nothing to place, {why}"


def _weight_needs(
    sizes: RunSizes, parts: tuple[Part, ...]
) -> tuple[tuple[Need, ...], Counter[str]]:
    """Allocations on the host, and bytes of the other homes."""
    homes = sizes.homes
    held: Counter[tuple[str, int]] = Counter()
    for group in sizes.tensors.groups:
        for shape, at in zip(group.shapes, weight_homes(group.sizes, homes.cuts), strict=True):
            for each in sizes.weight(shape):
                held[homes.weights[at], each] += group.count
    return _needs("weights", parts, held)


def _kv_needs(sizes: RunSizes, parts: tuple[Part, ...]) -> tuple[tuple[Need, ...], Counter[str]]:
    held: Counter[tuple[str, int]] = Counter()
    for home, count in zip(sizes.homes.kv, sizes.homes.sequences, strict=True):
        for nbytes in sizes.kv(count) if count else ():
            held[home, nbytes] += sizes.kv_tensors
    return _needs("kv", parts, held)


def _needs(
    kind: FlexGenKind, parts: tuple[Part, ...], held: Mapping[tuple[str, int], int]
) -> tuple[tuple[Need, ...], Counter[str]]:
    policies = {part.name: part.policy for part in parts}
    outside: Counter[str] = Counter()
    needs = []
    for (home, nbytes), count in held.items():
        if home in (ACCELERATOR, DISK):
            outside[home] += nbytes * count
        else:
            needs.append(Need(kind, home, policies[home], nbytes, count))
    return tuple(needs), outside


__getattr__ = old_names(__name__)
