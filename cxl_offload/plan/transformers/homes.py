"""Policies of every class of tensor, and the bytes that they put on every node.

Shares become whole percents, or finer parts where percents do not fit, and those the weights of an
interleave; bytes are then those of the tensors as the memory layer stripes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cxl_offload.core import BASE_PAGE_BYTES, HUGE_PAGE_BYTES
from cxl_offload.plan.decoding.block import Block
from cxl_offload.plan.decoding.sizes import CYCLES
from cxl_offload.plan.decoding.trace import COPIES
from cxl_offload.plan.equations.interleave import shares_of_weights
from cxl_offload.plan.equations.row_states import STATES
from cxl_offload.plan.equations.stripe import stripe_bytes
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.transformers.job import HEAD, DecoderJob
from cxl_offload.plan.transformers.layout import Layout
from cxl_offload.plan.transformers.shares import IDLE, KV, ON_CPU, STREAMED, Shares
from cxl_offload.plan.transformers.states import copied_states
from cxl_offload.topology.model import MAX_WEIGHT

_MOVES = 60
"""Times that parts move to where there is room before a plan of fewer sequences is tried."""

_PERCENTS = 100

_PARTS_TO_MOVE = 15
"""How much less than an interleave takes the finer parts of a node are: some may move there."""


@dataclass(frozen=True, slots=True)
class Homes:
    """A block of ``batches`` batches placed to the byte.

    Attributes
    ----------
    parts
        Parts of every class on every node: percents, or finer ones.
    kinds
        Bytes on every node by kind of weight that has a policy, of ``kv``, and of hidden states.
    work
        Bytes on every node that CPUs work in.
    resident
        Layers whose streamed kinds stay on the accelerator.
    kv_gpu
        Share of the cache there.
    """

    layout: Layout
    batches: int
    parts: Mapping[str, tuple[int, ...]]
    kinds: Mapping[str, tuple[int, ...]]
    work: tuple[int, ...]
    resident: int
    kv_gpu: float

    @property
    def rows(self) -> int:
        """Rows of one batch."""
        return self.layout.rows

    @property
    def host(self) -> tuple[int, ...]:
        """All bytes of every node."""
        return tuple(sum(part) for part in zip(self.work, *self.kinds.values(), strict=True))

    def class_of(self, kind: str) -> str:
        """Whose parts a kind has."""
        layout = self.layout
        classes = {STREAMED: layout.streamed, ON_CPU: layout.on_cpu, IDLE: layout.idle}
        classes[COPIES] = layout.copied
        return next((name for name, kinds in classes.items() if kind in kinds), kind)


def whole_parts(shares: Sequence[float]) -> tuple[int, ...]:
    """Whole percents nearest to shares, by largest remainders."""
    floors = [int(_PERCENTS * share + 1e-9) for share in shares]
    order = sorted(range(len(shares)), key=lambda at: floors[at] - _PERCENTS * shares[at])
    for at in order[: _PERCENTS - sum(floors)]:
        floors[at] += 1
    return tuple(floors)


def finer_parts(
    shares: Sequence[float], nbytes: float, room: Sequence[float], largest: int
) -> tuple[int, ...]:
    """Whole parts of the largest total that has room; of what is nearest to it where none has.

    Parameters
    ----------
    nbytes, largest
        Of all tensors that are striped so, and of the largest: an eighth of it is no less than a
        cycle of pages.
    room
        Bytes of every node beside its share.
    """
    most = int((MAX_WEIGHT - _PARTS_TO_MOVE) / max(shares))
    most = max(_PERCENTS, min(most, largest // (CYCLES * BASE_PAGE_BYTES)))
    reach = [share + free / nbytes for share, free in zip(shares, room, strict=True)]
    best, least = whole_parts(shares), math.inf
    for total in range(most, _PERCENTS - 1, -1):
        caps = [min(MAX_WEIGHT, max(0, int(total * each))) for each in reach]
        lack = 1 - sum(caps) / total
        if lack < least:
            best, least = _parts_below(caps, shares, total), lack
        if lack <= 0:
            break
    return best


def _parts_below(caps: Sequence[int], shares: Sequence[float], total: int) -> tuple[int, ...]:
    """Whole parts near to shares, none of them above its cap but where all are full."""
    parts = [min(cap, int(total * share)) for cap, share in zip(caps, shares, strict=True)]
    for _ in range(total - sum(parts)):
        below = [at for at, part in enumerate(parts) if part < caps[at]]
        at = max(below or range(len(parts)), key=lambda at: total * shares[at] - parts[at])
        parts[at] += 1
    return tuple(parts)


def _granule(parts: Sequence[int], tensor_bytes: int) -> int:
    """Bytes that stay together: pages, several cycles of them in a tensor where it is large."""
    cycle = sum(parts) // math.gcd(*parts)
    pages = tensor_bytes // (cycle * CYCLES) // BASE_PAGE_BYTES
    return min(max(1, pages) * BASE_PAGE_BYTES, HUGE_PAGE_BYTES)


def policy_of(hardware: Hardware, parts: Sequence[int], tensor_bytes: int) -> str:
    """The policy of tensors of which the most have so many bytes."""
    used = [(name, part) for name, part in zip(hardware.names, parts, strict=True) if part]
    if len(used) == 1:
        return f"bind:{used[0][0]}"
    common = math.gcd(*(part for _, part in used))
    weights = ",".join(f"{name}={part // common}" for name, part in used)
    return f"weighted:{weights}@{_granule(parts, tensor_bytes) // 1024}KiB"


def copies_policy(hardware: Hardware) -> str:
    """The policy of tensors with a copy near each socket, that of the first first."""
    return f"replicate:{','.join(hardware.names[at] for at in hardware.copy_nodes)}"


def _placed(parts: Sequence[int], nbytes: int, granule: int) -> list[int]:
    """Bytes on every node of one tensor, as it is striped."""
    common = math.gcd(*parts)
    used = {at: part // common for at, part in enumerate(parts) if part}
    if len(used) == 1:
        return [nbytes if part else 0 for part in parts]
    if nbytes < granule * sum(used.values()):  # too small for a cycle: on the heaviest node
        heaviest = max(used, key=lambda at: used[at])
        return [nbytes if at == heaviest else 0 for at in range(len(parts))]
    placed = stripe_bytes(nbytes, used, granule)
    return [placed.get(at, 0) for at in range(len(parts))]


def _sum(parts: Sequence[int], tensors: Sequence[tuple[int, int]], granule: int) -> list[int]:
    """Bytes on every node of ``(bytes, count)`` tensors."""
    total = [0] * len(parts)
    for nbytes, count in tensors:
        for at, placed in enumerate(_placed(parts, nbytes, granule)):
            total[at] += placed * count
    return total


def host_kv_bytes(job: DecoderJob, rows: int, kv_gpu: float) -> int:
    """Keys, or values, of a layer in host memory, of so many rows in a block."""
    return int(job.kv_sequence_bytes * rows * (1 - kv_gpu) / (2 * job.layers))


def largest_tensor(job: DecoderJob, homes: Homes, kind: str) -> int:
    """Bytes of the tensor of a kind that a policy's granule is chosen for."""
    rows = homes.rows * homes.batches
    if kind == KV:
        return host_kv_bytes(job, rows, homes.kv_gpu)
    return job.hidden_bytes(rows) if kind == STATES else largest_weight(job, kind)


def largest_weight(job: DecoderJob, kind: str) -> int:
    """The same of a kind of weight."""
    return max(nbytes for nbytes, _ in job.tensors(kind))


def whole_layers(job: DecoderJob, share: float) -> int:
    """Layers in a share of them."""
    return int(share * job.layers + 1e-6)


def whole_percents(share: float) -> int:
    """Percents in a share."""
    return int(100 * share + 1e-6)


def homes_of(job: DecoderJob, hardware: Hardware, layout: Layout, shares: Shares) -> Homes | None:
    """Whole percents of everything with its bytes, or finer parts; None where these do not fit."""
    batches = round(shares.batches)
    if not hardware.has_gpu:  # a block is one batch of as many rows
        layout, batches = layout.with_rows(batches), 1
    there = (whole_layers(job, shares.resident), shares.kv_gpu)

    def placed(parts: Mapping[str, tuple[int, ...]]) -> Homes:
        return _placed_kinds(job, layout, batches, parts, there, hardware)

    homes = placed({name: whole_parts(each) for name, each in shares.of.items()})
    found = _with_room(homes, hardware, placed)
    if found is None:
        finer = placed(_finer(job, hardware, homes, shares))
        found = _with_room(finer, hardware, placed)
    return found


def _with_room(
    homes: Homes, hardware: Hardware, placed: Callable[[Mapping[str, tuple[int, ...]]], Homes]
) -> Homes | None:
    """The same with parts moved to where there is room; None where that does not end."""
    tried = []
    for _ in range(_MOVES):
        free = [
            node.usable_bytes - have for node, have in zip(hardware.nodes, homes.host, strict=True)
        ]
        full = min(range(len(free)), key=lambda at: free[at])
        if free[full] >= 0:
            taken = max((part for each in homes.parts.values() for part in each), default=0)
            return homes if taken <= MAX_WEIGHT else None
        tried.append(homes.parts)
        most = max(range(len(free)), key=lambda at: free[at])
        moved = _some_moved(homes, full, most, -free[full])
        if moved is None or moved in tried:
            return None
        homes = placed(moved)
    return None


def _finer(
    job: DecoderJob, hardware: Hardware, homes: Homes, shares: Shares
) -> dict[str, tuple[int, ...]]:
    """Finer parts than those of homes: what rounding takes of a node, the next class leaves."""
    striped = {
        name: [kind for kind in homes.kinds if homes.class_of(kind) == name] for name in shares.of
    }
    sizes = {name: sum(sum(homes.kinds[kind]) for kind in striped[name]) for name in shares.of}
    fixed = {*homes.kinds} - {kind for kinds in striped.values() for kind in kinds}
    room = [node.usable_bytes - work for node, work in zip(hardware.nodes, homes.work, strict=True)]
    for at in range(len(room)):
        room[at] -= sum(homes.kinds[kind][at] for kind in fixed)
        room[at] -= sum(each[at] * sizes[name] for name, each in shares.of.items())
    parts = {}
    for name in sorted(shares.of, key=lambda name: -sizes[name]):
        each, nbytes = shares.of[name], max(1, sizes[name])
        largest = max((largest_tensor(job, homes, kind) for kind in striped[name]), default=0)
        parts[name] = finer_parts(each, nbytes, room, largest)
        for at, part in enumerate(parts[name]):
            room[at] -= (part / sum(parts[name]) - each[at]) * nbytes
    return parts


def _some_moved(
    homes: Homes, full: int, free: int, lack: float
) -> dict[str, tuple[int, ...]] | None:
    """Parts of one class from a node that lacks bytes to the one with most room.

    As many as make up for the lack: one after the other, those of a small class would use up all
    moves.
    """
    for name in (IDLE, STATES, STREAMED, ON_CPU, KV):
        each = list(homes.parts.get(name, ()))
        if each and each[full] and full != free and each[free] < MAX_WEIGHT:
            whole = sum(sum(b) for kind, b in homes.kinds.items() if homes.class_of(kind) == name)
            wanted = max(1, math.ceil(sum(each) * lack / max(whole, 1)))
            count = min(each[full], wanted, MAX_WEIGHT - each[free])
            each[full] -= count
            each[free] += count
            return {**homes.parts, name: tuple(each)}
    return None


def _placed_kinds(
    job: DecoderJob,
    layout: Layout,
    batches: int,
    parts: Mapping[str, tuple[int, ...]],
    there: tuple[int, float],
    hardware: Hardware,
) -> Homes:
    """``there``: layers, and the share of the cache, that are on the accelerator."""
    resident, kv_gpu = there
    made: dict[str, tuple[int, ...]] = {}
    for name, kinds in ((STREAMED, layout.streamed), (ON_CPU, layout.on_cpu), (IDLE, layout.idle)):
        for kind in sorted(kinds):
            granule = _granule(parts[name], largest_weight(job, kind))
            tensors = job.tensors(kind)
            if name == STREAMED and kind != HEAD:
                tensors = [
                    (each, count - count * resident // job.layers) for each, count in tensors
                ]
            made[kind] = tuple(_sum(parts[name], tensors, granule))
    for kind in sorted(layout.copied):
        nbytes, near = job.kinds[kind].bytes, hardware.copy_nodes
        made[kind] = tuple(nbytes if at in near else 0 for at in range(len(hardware.nodes)))
    if KV in parts:
        nbytes = host_kv_bytes(job, layout.rows * batches, kv_gpu)
        placed = _sum(parts[KV], [(nbytes, 2 * job.layers)], _granule(parts[KV], nbytes))
        made[KV] = tuple(placed)
    if STATES in parts:
        nbytes = job.hidden_bytes(layout.rows * batches)
        tensors = [(nbytes, layout.state_tensors(job))]
        made[STATES] = tuple(_sum(parts[STATES], tensors, _granule(parts[STATES], nbytes)))
    if not made:
        made["kv"] = (0,) * len(hardware.nodes)
    work = _worked_in(job, hardware, layout.rows, made)
    return Homes(layout, batches, parts, made, work, resident, kv_gpu)


def _worked_in(
    job: DecoderJob, hardware: Hardware, rows: int, kinds: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...]:
    """Working memory of the CPUs: on the first node, and on the next where that is full."""
    left = 0 if hardware.has_gpu else job.work_bytes(rows)
    made = []
    for node, held in zip(hardware.nodes, zip(*kinds.values(), strict=True), strict=True):
        here = min(left, max(0, int(node.usable_bytes) - sum(held)))
        made.append(here)
        left -= here
    made[0] += left  # what has no room is missing there
    return tuple(made)


def resident_bytes(job: DecoderJob, homes: Homes, kind: str) -> int:
    """Of a kind that is streamed, what stays on the accelerator."""
    return job.kinds[kind].bytes - sum(homes.kinds[kind])


def gpu_kv_bytes(job: DecoderJob, homes: Homes) -> int:
    """Keys and values on the accelerator."""
    return round(homes.rows * homes.batches * job.kv_sequence_bytes * homes.kv_gpu)


def gpu_bytes(job: DecoderJob, homes: Homes) -> int:
    """The most that the accelerator holds: while layers compute a batch, or the head all rows."""
    layout, rows = homes.layout, homes.rows * homes.batches
    held = layout.gpu_bytes(job)
    layers = held + layout.held_bytes(job, rows)
    head = held - job.work_bytes(homes.rows) + job.logits_bytes(rows)
    resident = sum(resident_bytes(job, homes, kind) for kind in layout.streamed)
    return max(layers, head) + resident + gpu_kv_bytes(job, homes)


def block_of(job: DecoderJob, hardware: Hardware, homes: Homes) -> Block:
    """The same as the equations take it."""
    layout, none = homes.layout, (0.0,) * len(hardware.nodes)
    shares = {name: shares_of_weights(each) for name, each in homes.parts.items()}
    rows, states = layout.rows * homes.batches, None
    if STATES in shares:
        states = copied_states(job, layout, rows, shares[STATES])

    def on_nodes(kinds: frozenset[str]) -> tuple[float, ...]:
        return tuple(
            float(sum(part))
            for part in zip(none, *(homes.kinds[kind] for kind in kinds), strict=True)
        )

    return Block(
        sequences=rows,
        batches=homes.batches,
        gpu_batch=layout.rows,
        weights_drive=0.0,
        weights_host=on_nodes(layout.streamed),
        weight_shares=shares.get(STREAMED),
        kv_drive=0.0,
        kv_host=tuple(share * (1 - homes.kv_gpu) for share in shares.get(KV, none)),
        kv_gpu=homes.kv_gpu,
        kv_shares=shares.get(KV),
        activations_gpu=1.0 if states is None else 0.0,
        weights_cpu=on_nodes(layout.on_cpu),
        cpu_shares=shares.get(ON_CPU),
        params_cpu=sum(job.kinds[kind].met for kind in layout.multiplied),
        cpu_read_share=layout.cpu_read_share(job, layout.rows),
        unread=layout.unread_bytes(job, layout.rows),
        weights_copied=float(layout.bytes_of(job, layout.copied)),
        states=states,
    )
