"""Times the operators of torch that decoding is made of; no framework and no model runs.

Decode times are predicted from a profile of them (:mod:`cxl_offload.plan.flexgen.decode_time`). All
are timed in the sequence of a plain decoder layer
(:mod:`cxl_offload.profile.operators.decoder_layer`).
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from cxl_offload.memory.heap import keep_freed_memory
from cxl_offload.ops.measured_linear import MeasuredLinear
from cxl_offload.profile.curves import Estimate, estimate
from cxl_offload.profile.operators.adam_step import measure_adam
from cxl_offload.profile.operators.cache_operators import CacheLoader
from cxl_offload.profile.operators.cache_types import measure_cache_types
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
from cxl_offload.profile.operators.gated_layer import LEAST_S, measure_gated
from cxl_offload.profile.operators.model import (
    CacheOperator,
    CachePoint,
    LayerPoint,
    LinearPoint,
    OperatorProfile,
)
from cxl_offload.profile.operators.ring import ring_bytes
from cxl_offload.profile.schedule import Progress

_ROWS = (1, 2, 4, 8, 16, 32, 64)

_WIDTHS = (768, 2048)
"""Widths of layers, whose matrices have 1.1, 4.5, 8 and 32 MiB in half precision."""

_POSITIONS = 263
"""A number that nothing divides, as most lengths of a decode: at 256 torch's products over copies
are up to 1.6 times faster (measured)."""

_PIECES = 10
"""Different pieces of Python, which together have as many instructions as a layer of FlexGen."""

_LEAST_VISITS, _FIRST_VISITS = 16, 2
"""Least layers that are timed after some that are not, with either attention in turns."""

LayerEngine = Literal["flexgen", "transformers"]
SamplesByLabel = Mapping[Label, Sequence[float]]


@torch.no_grad()  # as frameworks have it; in inference mode views are cheaper
def measure_operators(
    device: str | torch.device = "cpu",
    *,
    seconds: float = 12.0,
    rows: Sequence[int] = _ROWS,
    only: LayerEngine | None = None,
    progress: Progress | None = None,
    clock: Clock = time.perf_counter,
) -> OperatorProfile:
    """Linear layers, attention, copies of keys and values, what is between them; half precision.

    Parameters
    ----------
    device
        Where weights and activations are: ``cpu`` or ``cuda``.
    seconds
        For stacks of layers; each makes at least 4 turns, whatever that takes.
    rows
        Of the stacks of layers, as FlexGen's batches have.
    only
        The engine whose decoding is to be predicted; None: all that plans ask for.
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
    where = device_of(device)
    ring, steps = ring_bytes(), len(rows) * len(_WIDTHS)
    keep_freed_memory()  # as a run of FlexGen does; page faults would hide what is timed
    codes = copies_of_the_code(_PIECES)
    instructions = _PIECES * FrameworkCode().instructions()
    linears: list[LinearPoint] = []
    caches: list[CachePoint] = []
    layers: list[LayerPoint] = []
    for hidden in _WIDTHS:
        stack = Stack(hidden, where, codes, ring)
        for count in rows:
            run = stack.run(count, Stopwatch(where, clock), seconds / steps)
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
        **_of_other_engines(only, clock, ring) if where.type == "cpu" else {},
    )


def device_of(device: str | torch.device) -> torch.device:
    """The device to measure on.

    Raises
    ------
    ValueError
        torch sees no GPU.
    """
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("measure operators on cuda: torch sees no GPU")
    return where


def _of_other_engines(only: LayerEngine | None, clock: Clock, ring: int) -> dict[str, Any]:
    """What decoders of transformers are made of, and what plans alone ask for."""
    if only == "flexgen":
        return {}
    gated = measure_gated(clock, ring)
    ordered = sorted(gated.products, key=lambda point: (point.weight_bytes, point.rows))
    found: dict[str, Any] = {"products": tuple(ordered), "pieces": gated.pieces}
    if only is None:
        found["cache_types"] = measure_cache_types(clock, ring)
        found["adam"] = measure_adam(clock, ring)
    return found


@dataclass(frozen=True, slots=True)
class _Run:
    """Seconds by label of every layer in every turn."""

    hidden: int
    rows: int
    samples: SamplesByLabel

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


class Stack:
    """Layers whose weights are together larger than the caches."""

    def __init__(
        self,
        hidden: int,
        device: torch.device,
        codes: Sequence[type[FrameworkCode]],
        ring_bytes: int,
    ) -> None:
        count = max(2, -(-ring_bytes // (24 * hidden**2)))
        self._hidden, self._device = hidden, device
        self._count, self._ring_bytes = count, ring_bytes
        self._visits = itertools.cycle([DecoderLayer(hidden, device, codes) for _ in range(count)])

    def run(self, rows: int, watch: Stopwatch, seconds: float) -> _Run:
        """Its layers one after the other with so many rows, from where the last run ended."""
        hidden, device = self._hidden, self._device
        caches = _caches(rows, hidden, device, self._count, self._ring_bytes)
        mask = torch.ones(rows, _POSITIONS, dtype=torch.bool, device=device)
        x = torch.rand(rows, 1, hidden, device=device).half()
        load, linear = CacheLoader(device), MeasuredLinear()  # on a GPU it is torch's own
        samples: defaultdict[Label, list[float]] = defaultdict(list)
        end, visit, timed = time.perf_counter() + seconds, 0, 0
        while timed < _LEAST_VISITS or time.perf_counter() < end:
            how = Decoding(watch, linear, mask, load, in_place=visit // 2 % 2 == 0)
            cache, following = (caches[each % len(caches)] for each in (visit, visit + 1))
            watch.reset()
            next(self._visits).decode(x, cache, following, how)
            # Before, ways were tried; and nothing was ever used.
            if not linear.is_trying and visit >= _FIRST_VISITS:
                timed += 1
                for label, taken in watch.seconds.items():
                    samples[label].append(taken)
            visit += 1
        return _Run(hidden, rows, samples)


def _caches(rows: int, hidden: int, device: torch.device, most: int, ring: int) -> list[LayerCache]:
    """Caches of enough layers that none is found in the processor's cache again, or of ``most``."""
    shape = (_POSITIONS + 1, rows * hidden // HEAD_DIM, HEAD_DIM)
    nbytes = 4 * _POSITIONS * rows * hidden
    made = []
    for _ in range(min(most, max(2, ring // nbytes))):
        # Written to: memory that never was has no pages of its own.
        k, v = (torch.full(shape, 0.01, dtype=torch.float16) for _ in "kv")
        if device.type == "cuda":
            k, v = k.pin_memory(), v.pin_memory()
        made.append(LayerCache((k, v), (k.to(device), v.to(device))))
    return made


def _each(samples: Sequence[float], count: int) -> Estimate:
    return estimate([max(taken, LEAST_S) / count for taken in samples])
