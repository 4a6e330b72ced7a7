"""What a plan for transformers decides for whole kinds: which device computes with them, and rows.

They are what the integration carries out. A kind of weight is on the accelerator, or streamed to
it for every pass over the layers; without an accelerator CPUs multiply all of them where they lie.
Keys and values are on the accelerator, on the host, or the first positions of every sequence there
and the others here. Hidden states between layers are on the accelerator or, of several batches, on
the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cxl_offload.plan.decoding.sizes import MOST_SEQUENCES
from cxl_offload.plan.equations.row_states import BUFFERS, STATES, tier_copies
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.transformers.job import EMBEDDING, HEAD, DecoderJob

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows of one accelerator batch to try; each is more than a layer's weights need to be read for."""

_KV_HOMES: tuple[Literal["gpu", "both", "host"], ...] = ("gpu", "both", "host")

COPIED_ROWS = 64
"""Rows up to which the package's kernel computes linear layers, which alone reads copies near its
threads."""

COPIED = frozenset({"attention", "mlp", "head"})
"""Kinds that may have copies near the sockets: those of linear layers but experts."""

JOINED_BYTES = 2 * (64 << 20)
"""Keys and values that the accelerator has as float32 at a time, at most, where it attends to a
part of the cache."""

_SMALL = 0.005
"""Kinds with less of all weights (norms, routers) are on the accelerator: nothing depends on
them."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows of a batch, and kinds of weights by who computes with them; the rest is on the GPU.

    ``idle`` are looked up, never read as a whole; of ``copied`` each socket has a copy, and its
    CPUs multiply that. Some layers of what is streamed may stay on the GPU, and a share of ``kv``
    that is in ``both`` places. ``states`` are the hidden states of all rows of a block. Without a
    GPU a block is one batch, and ``rows`` is 1: what is counted are its rows.
    """

    rows: int
    streamed: frozenset[str]
    on_cpu: frozenset[str]
    idle: frozenset[str]
    kv: Literal["gpu", "both", "host"] = "host"
    copied: frozenset[str] = frozenset()
    states: Literal["gpu", "host"] = "gpu"

    def with_rows(self, rows: int) -> Layout:
        """The same of batches of so many rows; ``replace`` takes five times as long."""
        return Layout(
            rows, self.streamed, self.on_cpu, self.idle, self.kv, self.copied, self.states
        )

    @property
    def fewest_batches(self) -> int:
        """Of one batch the integration leaves hidden states on the accelerator."""
        return 2 if self.states == "host" else 1

    def home_of(self, kind: str) -> str:
        """``gpu``, ``streamed``, ``cpu``, ``copies`` or ``idle``; of the cache and of hidden states
        as their attributes."""
        if kind in ("kv", STATES):
            return self.kv if kind == "kv" else self.states
        homes = {"streamed": self.streamed, "cpu": self.on_cpu, "idle": self.idle}
        homes["copies"] = self.copied
        return next((home for home, kinds in homes.items() if kind in kinds), "gpu")

    @property
    def multiplied(self) -> frozenset[str]:
        """Kinds that CPUs multiply, wherever they lie."""
        return self.on_cpu | self.copied

    def host_bytes(self, job: DecoderJob, hardware: Hardware) -> int:
        """Weights in host memory, with all copies."""
        once = self.bytes_of(job, self.streamed | self.on_cpu | self.idle)
        return once + len(hardware.copy_nodes) * self.bytes_of(job, self.copied)

    def bytes_of(self, job: DecoderJob, kinds: frozenset[str]) -> int:
        """Weights of these kinds."""
        return job.bytes_of(kinds)

    def layered_bytes(self, job: DecoderJob) -> int:
        """Of what is streamed, what is in layers, of which some may stay on the GPU."""
        return self.bytes_of(job, self.streamed - {HEAD})

    def most_resident_bytes(self, job: DecoderJob) -> float:
        """Of that, all but one layer: a kind of which all stay is another layout."""
        return self.layered_bytes(job) * (1 - 1 / job.layers)

    def held_bytes(self, job: DecoderJob, rows: int) -> int:
        """Of all rows of a block, what the accelerator holds while layers compute some of them."""
        if self.states == "host":
            return job.ids_bytes(rows)
        return job.inputs_bytes(rows) + job.between_bytes(rows)

    def state_tensors(self, job: DecoderJob) -> int:
        """Tensors of hidden states of all rows that the host has at a time, in the prefill."""
        return tier_copies(len(job.tables), streamed=True) if self.states == "host" else 0

    def state_bytes(self, job: DecoderJob, rows: int) -> int:
        """Bytes of them."""
        return self.state_tensors(job) * job.hidden_bytes(rows)

    def buffer_bytes(self, job: DecoderJob) -> int:
        """What the accelerator has for hidden states that come and go."""
        return BUFFERS * job.hidden_bytes(self.rows) if self.states == "host" else 0

    def cpu_read_share(self, job: DecoderJob, rows: float) -> float:
        """Share of what CPUs multiply that one pass of so many rows reads."""
        held = self.bytes_of(job, self.on_cpu)
        return job.read_bytes(self.on_cpu, rows) / held if held else 1.0

    def unread_bytes(self, job: DecoderJob, rows: float) -> float:
        """Of the weights that are streamed or on the GPU, what one pass does not read."""
        kinds = job.kinds.keys() - self.on_cpu
        return self.bytes_of(job, frozenset(kinds)) - job.read_bytes(kinds, rows)

    @staticmethod
    def large(job: DecoderJob) -> list[str]:
        """Kinds of weights whose home makes a difference."""
        least = _SMALL * job.weight_bytes
        return [k for k in job.kinds if k != EMBEDDING and job.kinds[k].bytes >= least]

    def gpu_bytes(self, job: DecoderJob) -> int:
        """What the accelerator holds beside layers that stay, keys, values and hidden states."""
        weights = job.gpu_weight_bytes(self.streamed, self.idle)
        joining = min(JOINED_BYTES, job.layer_kv_as_float(self.rows)) if self.kv == "both" else 0
        return weights + joining + self.buffer_bytes(job) + job.work_bytes(self.rows)

    def gpu_room(self, job: DecoderJob, hardware: Hardware) -> float:
        """What the accelerator has left for those."""
        return hardware.gpu_usable_bytes - self.gpu_bytes(job)


def layouts(
    job: DecoderJob, hardware: Hardware, *, batches: Sequence[int] = BATCHES
) -> Iterator[Layout]:
    """Everything to choose from."""
    kinds = frozenset(job.kinds)
    idle = kinds & {EMBEDDING}
    if not hardware.has_gpu:
        yield Layout(1, frozenset(), kinds - idle, idle)
        if hardware.copy_nodes:
            copied = kinds & COPIED
            on_cpu = kinds - idle - copied
            yield Layout(1, frozenset(), on_cpu, idle, copied=copied)
        return
    large, looked_up = Layout.large(job), dict.fromkeys((frozenset[str](), idle))
    # What is kept as another type is attended to by CPUs.
    kv_homes = _KV_HOMES if job.kv_dtype is None else _KV_HOMES[-1:]
    for homes in itertools.product(("gpu", "streamed"), repeat=len(large)):
        pairs = zip(large, homes, strict=True)
        streamed = frozenset(kind for kind, home in pairs if home == "streamed")
        for rows, kv, away in itertools.product(batches, kv_homes, looked_up):
            layout = Layout(rows, streamed, frozenset(), away, kv)
            if layout.gpu_bytes(job) <= hardware.gpu_usable_bytes:
                yield layout


def states_on_host(every: Iterable[Layout]) -> list[Layout]:
    """The layouts that room for more batches may make faster, with hidden states on the host.

    Where no weights are streamed, more batches read as many bytes for each.
    """
    return [replace(each, states="host") for each in every if each.streamed]


def fullest(
    job: DecoderJob, hardware: Hardware, layout: Layout, known: Mapping[int, int], *, counts: int
) -> Iterator[tuple[Layout, int]]:
    """A layout with as many rows as all memory has room for in 1, 2 and more batches of them.

    No batch is part empty then. Each comes with the most batches of it.

    Parameters
    ----------
    known
        Most batches by rows, of some rows; none has more rows than the most of them.
    counts
        Most batches to fill memory with.
    """
    found, count = dict(known), 1
    while count <= counts:
        low = max((rows for rows, fit in found.items() if fit >= count), default=0)
        high = min((rows for rows in found if rows > low), default=low + 1) - 1
        while low < high:
            middle = (low + high + 1) // 2
            found[middle] = most_batches(job, hardware, layout.with_rows(middle))
            low, high = (middle, high) if found[middle] >= count else (low, middle - 1)
        if not low:
            return
        if low not in known:
            yield layout.with_rows(low), found[low]
        count = found[low] + 1


def most_batches(job: DecoderJob, hardware: Hardware, layout: Layout) -> int:
    """No block of a layout has more batches than all memory has room for."""
    each = layout.rows * job.kv_sequence_bytes
    host = hardware.usable_bytes - layout.host_bytes(job, hardware)
    if not hardware.has_gpu:
        found = host / (each + job.work_bytes(1))
        return min(max(0, int(found)), COPIED_ROWS if layout.copied else MOST_SEQUENCES)
    gpu, held = layout.gpu_room(job, hardware), layout.held_bytes(job, layout.rows)
    with_layers = host + min(gpu, layout.most_resident_bytes(job))
    if gpu < 0 or with_layers < 0:
        return 0
    states = layout.state_bytes(job, layout.rows)
    every = each + held + states
    bounds = {
        "gpu": (gpu / (each + held),),
        "both": (gpu / held, (host + gpu) / every),
        "host": (gpu / held, (host + gpu) / every, with_layers / (each + states)),
    }
    found = min(bounds[layout.kv])
    if states:
        logits = job.logits_bytes(layout.rows)
        with_logits = (gpu + job.work_bytes(layout.rows)) / logits
        found = min(found, with_layers / states, (host + gpu) / every, with_logits)
    return min(int(found), max(1, MOST_SEQUENCES // layout.rows))
