"""Times the operators of torch that decoding is made of; no framework and no model runs.

Decode times are predicted from a profile of them (:mod:`cxl_offload.plan.flexgen.decode_time`). All
are timed in the sequence of a plain decoder layer
(:mod:`cxl_offload.profile.operators.decoder_layer`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch

from cxl_offload.memory.heap import keep_freed_memory
from cxl_offload.ops.measured_linear import MeasuredLinear
from cxl_offload.profile.curves import Estimate, estimate
from cxl_offload.profile.operators.cache_operators import CacheLoader
from cxl_offload.profile.operators.decoder_layer import (
    CALLS,
    HEAD_DIM,
    Clock,
    DecoderLayer,
    Decoding,
    Label,
    LayerCache,
    Stopwatch,
)
from cxl_offload.profile.operators.framework_code import FrameworkCode, copies_of_the_code
from cxl_offload.profile.operators.gated_layer import measure_pieces
from cxl_offload.profile.operators.model import (
    CacheOperator,
    CachePoint,
    LayerPoint,
    LinearPoint,
    OperatorProfile,
)
from cxl_offload.profile.operators.products import measure_products
from cxl_offload.profile.schedule import Progress

_ROWS = (1, 2, 4, 8, 16, 32, 64)

_WIDTHS = (768, 2048)
"""Widths of layers, whose matrices have 1.1, 4.5, 8 and 32 MiB in half precision."""

_RING_BYTES = 160 << 20
"""Weights of a stack of layers, and the caches of their keys and values: many times what a core has
of a last-level cache, so that nothing is found there when its turn comes again."""

_POSITIONS = 263
"""A number that nothing divides, as most lengths of a decode: at 256 torch's products over copies
are up to 1.6 times faster (measured)."""

_PIECES = 10
"""Different pieces of Python, which together have as many instructions as a layer of FlexGen."""

_LEAST_TURNS = 4
"""Least turns of a stack, with attention over copies and in place alternately."""

_LEAST_S = 1e-9
Samples = Mapping[Label, Sequence[float]]


@torch.no_grad()  # as frameworks have it; in inference mode views are cheaper
def measure_operators(
    device: str | torch.device = "cpu",
    *,
    seconds: float = 12.0,
    progress: Progress | None = None,
    clock: Clock = time.perf_counter,
) -> OperatorProfile:
    """Linear layers, attention, copies of keys and values, what is between them; half precision.

    Parameters
    ----------
    device
        Where weights and activations are: ``cpu`` or ``cuda``.
    seconds
        In all; every stack of layers makes at least 4 turns, whatever that takes.
    progress
        Called with a label, and how many of how many measurements are done.
    clock
        Seconds since any moment: ``time.process_time`` for one thread on a CPU that others use too.

    Raises
    ------
    ValueError
        ``seconds`` is not above 0, or torch sees no GPU.
    """
    if not seconds > 0:
        raise ValueError(f"measure operators for {seconds} s: give a time above 0")
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("measure operators on cuda: torch sees no GPU")
    steps = len(_ROWS) * len(_WIDTHS)
    keep_freed_memory()  # as a run of FlexGen does; page faults would hide what is timed
    codes = copies_of_the_code(_PIECES)
    instructions = _PIECES * FrameworkCode().instructions()
    linears: list[LinearPoint] = []
    caches: list[CachePoint] = []
    layers: list[LayerPoint] = []
    for hidden in _WIDTHS:
        for run in _runs(hidden, where, codes, Stopwatch(where, clock), seconds / steps):
            linears += run.linears()
            layers.append(run.layer(instructions))
            if hidden == _WIDTHS[0]:
                caches += run.caches()
            if progress is not None:
                progress(f"layer of {hidden}, rows: {run.rows}", len(layers), steps)
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else where.type
    return OperatorProfile(
        device=name,
        threads=torch.get_num_threads(),
        linears=tuple(sorted(linears, key=lambda point: (point.weight_bytes, point.rows))),
        caches=tuple(caches),
        layers=tuple(layers),
        products=measure_products(clock) if where.type == "cpu" else (),
        pieces=measure_pieces(clock) if where.type == "cpu" else (),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """Seconds by label of every layer in every turn."""

    hidden: int
    rows: int
    samples: Samples

    def linears(self) -> list[LinearPoint]:
        square = 2 * self.hidden**2
        return [
            LinearPoint(self.rows, square, _each(self.samples["square"], 4)),
            LinearPoint(self.rows, 4 * square, _each(self.samples["inner"], 2)),
        ]

    def caches(self) -> list[CachePoint]:
        nbytes = 4 * _POSITIONS * self.rows * self.hidden
        names: tuple[CacheOperator, ...] = get_args(CacheOperator)
        return [CachePoint(name, nbytes, _each(self.samples[name], 1)) for name in names]

    def layer(self, instructions: int) -> LayerPoint:
        calls = _each(self.samples["calls"], CALLS)
        return LayerPoint(
            self.rows, self.hidden, calls, _each(self.samples["python"], instructions)
        )


def _runs(
    hidden: int,
    device: torch.device,
    codes: Sequence[type[FrameworkCode]],
    watch: Stopwatch,
    seconds: float,
) -> Iterator[_Run]:
    """A stack of layers with each number of rows."""
    count = max(2, -(-_RING_BYTES // (24 * hidden**2)))
    layers = [DecoderLayer(hidden, device, codes) for _ in range(count)]
    for rows in _ROWS:
        caches = _caches(rows, hidden, device, count)
        mask = torch.ones(rows, _POSITIONS, dtype=torch.bool, device=device)
        x = torch.rand(rows, 1, hidden, device=device).half()
        load, linear = CacheLoader(device), MeasuredLinear()  # on a GPU it is torch's own
        samples: defaultdict[Label, list[float]] = defaultdict(list)
        end, turn = time.perf_counter() + seconds, 0
        while turn <= _LEAST_TURNS or time.perf_counter() < end:
            how = Decoding(watch, linear, mask, load, in_place=turn % 2 == 0)
            for at, layer in enumerate(layers):
                watch.reset()
                cache, following = (caches[each % len(caches)] for each in (at, at + 1))
                layer.decode(x, cache, following, how)
                if turn:  # before, nothing was ever used
                    for label, taken in watch.seconds.items():
                        samples[label].append(taken)
            turn += 1
        yield _Run(hidden, rows, samples)


def _caches(rows: int, hidden: int, device: torch.device, most: int) -> list[LayerCache]:
    """Caches of enough layers that none is found in the processor's cache again, or of ``most``."""
    shape = (_POSITIONS + 1, rows * hidden // HEAD_DIM, HEAD_DIM)
    nbytes = 4 * _POSITIONS * rows * hidden
    made = []
    for _ in range(min(most, max(2, _RING_BYTES // nbytes))):
        # Written to: memory that never was has no pages of its own.
        k, v = (torch.full(shape, 0.01, dtype=torch.float16) for _ in "kv")
        if device.type == "cuda":
            k, v = k.pin_memory(), v.pin_memory()
        made.append(LayerCache((k, v), (k.to(device), v.to(device))))
    return made


def _each(samples: Sequence[float], count: int) -> Estimate:
    return estimate([max(taken, _LEAST_S) / count for taken in samples])
