"""Times the operators of torch that decoding is made of; no framework and no model runs.

A profile of them (:mod:`cxl_offload.profile.operators`) is what decode times are predicted from
(:mod:`cxl_offload.plan.flexgen.decode_time`).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from types import FrameType
from typing import Any

import torch
from torch.nn import functional

from cxl_offload.ops.attention import decode_attention, from_flexgen
from cxl_offload.ops.linear import SinglePrecisionLinear
from cxl_offload.profile.curves import estimate
from cxl_offload.profile.model import Estimate
from cxl_offload.profile.operators import (
    CacheOperator,
    CachePoint,
    LinearPoint,
    OperatorProfile,
)
from cxl_offload.profile.schedule import Progress

__all__ = ["measure_operators"]

_ROWS = (1, 2, 4, 8, 16, 32, 64)
_WIDTHS = (768, 1536, 3072, 6144)
"""Of square matrices, 1.1 to 72 MiB in half precision."""

_BANK_BYTES = 384 << 20
"""Operands are taken in turn from so much memory: several last-level caches of a core's share, so
that none is found in them."""

_HEAD_DIM, _POSITIONS = 64, 263
"""A number that nothing divides, as most lengths of a decode: at 256 torch's products over copies
are up to 1.6 times faster (measured)."""

_COLUMNS = (12, 48, 192, 768)
"""Sequences times heads of a cache; 0.75 to 48 MiB of keys and values."""

_OTHER_BYTES = 8 << 20
"""What other work goes over between two timed calls: more than a core's own caches."""

_LEAST_SAMPLES = 7
_LARGE_ELEMENTS = 1 << 18
Call = Callable[[], object]
Inputs = dict[int, torch.Tensor]
Matrices = list[tuple[torch.Tensor, torch.Tensor]]
Cache = tuple[torch.Tensor, torch.Tensor]


class _Clock:
    """Times calls on a device one by one, each after other work has had the caches.

    In a model every operator finds its operands, its instructions and the memory that it writes to
    pushed out by the layers before: timed in a loop of its own it would look twice as fast.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device = device
        self._seconds = seconds
        self._other = torch.zeros(_OTHER_BYTES, dtype=torch.uint8, device=device)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def __call__(self, call: Call) -> Estimate:
        """Seconds of one call, waited for."""
        call()
        samples: list[float] = []
        end = time.perf_counter() + self._seconds
        while len(samples) < _LEAST_SAMPLES or time.perf_counter() < end:
            self._other.add_(1)
            self._wait()
            begin = time.perf_counter()
            call()
            self._wait()
            samples.append(time.perf_counter() - begin)
        return estimate(samples)


@torch.inference_mode()
def measure_operators(
    device: str | torch.device = "cpu", *, seconds: float = 12.0, progress: Progress | None = None
) -> OperatorProfile:
    """Linear layers, attention and copies of keys and values, small calls; in half precision.

    Parameters
    ----------
    device
        Where weights and activations are: ``cpu`` or ``cuda``.
    seconds
        In all; every operator is timed at least 5 times, whatever that takes.
    progress
        Called with a label, and how many of how many measurements are done.

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
    steps = len(_ROWS) * len(_WIDTHS) + len(_COLUMNS) * 3 + 3
    clock = _Clock(where, seconds / steps)
    done = 0

    def tell(label: str) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(label, done, steps)

    linears, caches = [], []
    for point in _linears(where, clock):
        linears.append(point)
        tell(f"linear, {point.rows} rows of {point.weight_bytes >> 20} MiB")
    for entry in _caches(where, clock):
        caches.append(entry)
        tell(f"{entry.operator} over {entry.cache_bytes / 2**20:.2g} MiB")
    small, per_byte, python = _calls(where, clock)
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else where.type
    return OperatorProfile(
        device=name,
        threads=torch.get_num_threads(),
        linears=tuple(linears),
        caches=tuple(caches),
        small_s=small,
        elementwise_s_per_byte=per_byte,
        python_instruction_s=python,
    )


def _linears(device: torch.device, clock: _Clock) -> Iterator[LinearPoint]:
    linear = SinglePrecisionLinear()  # on a GPU it is torch's own
    for width in _WIDTHS:
        weight_bytes = 2 * width * width
        count = max(1, _BANK_BYTES // (3 * weight_bytes))
        bank = [_matrices(width, device) for _ in range(count)]
        for rows in _ROWS:
            inputs = {
                each: torch.rand(rows, 1, each, device=device).half()
                for each in (width, width // 2, 2 * width)
            }
            turns = cycle(bank)

            def call(inputs: Inputs = inputs, turns: Iterator[Matrices] = turns) -> None:
                for weight, bias in next(turns):
                    linear(inputs[weight.shape[1]], weight, bias)

            yield LinearPoint(rows, weight_bytes, _scaled(clock(call), 1 / 3))


def _matrices(width: int, device: torch.device) -> Matrices:
    """A square one and two of four to one, of as many bytes, with their biases: a decoder's."""
    made = []
    for outputs, inputs in ((width, width), (2 * width, width // 2), (width // 2, 2 * width)):
        weight = torch.rand(outputs, inputs, device=device).sub_(0.5).half()
        made.append((weight, torch.zeros(outputs, dtype=torch.float16, device=device)))
    return made


def _caches(device: torch.device, clock: _Clock) -> Iterator[CachePoint]:
    for columns in _COLUMNS:
        shape = (_POSITIONS, columns, _HEAD_DIM)
        nbytes = 4 * _POSITIONS * columns * _HEAD_DIM
        first = torch.rand(shape).sub_(0.5).half()
        on_host = [(first.clone(), first.clone()) for _ in range(max(2, _BANK_BYTES // nbytes))]
        there = on_host
        if device.type == "cuda":
            on_host = [(k.pin_memory(), v.pin_memory()) for k, v in on_host]
            there = [(k.to(device), v.to(device)) for k, v in on_host]
        q = torch.rand(columns, 1, _HEAD_DIM, device=device).half()
        mask = torch.ones(columns // 12, _POSITIONS, dtype=torch.bool, device=device)
        operators: dict[CacheOperator, tuple[Callable[..., object], list[Cache]]]
        operators = {
            "copied attention": (_copied_attention, there),
            "attention in place": (_attention_in_place, on_host),
            "load": (_load, on_host),
        }
        for operator, (function, bank) in operators.items():
            turns = cycle(bank)

            def call(
                function: Callable[..., object] = function,
                turns: Iterator[Cache] = turns,
                q: torch.Tensor = q,
                mask: torch.Tensor = mask,
            ) -> None:
                function(q, *next(turns), mask)

            yield CachePoint(operator, nbytes, clock(call))


def _copied_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Over contiguous copies ``(columns, dim, positions)``; in single precision on the CPU."""
    positions, columns, dim = k.shape
    rows = mask.shape[0]
    keys = k.permute(1, 2, 0).reshape(columns, dim, positions)
    values = v.permute(1, 0, 2).reshape(columns, positions, dim)
    if not q.is_cuda:
        q, keys, values = q.float(), keys.float(), values.float()
    scores = torch.bmm(q, keys).view(rows, columns // rows, 1, positions)
    scores = torch.where(mask.view(rows, 1, 1, positions), scores, -1e4)
    weights = functional.softmax(scores.view(columns, 1, positions), dim=2)
    return torch.bmm(weights, values).half()


def _attention_in_place(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    rows = mask.shape[0]
    value = decode_attention(
        q.cpu().view(rows, q.shape[0] // rows, -1),
        from_flexgen(k, rows),
        from_flexgen(v, rows),
        mask=mask.cpu(),
        scale=1.0,
    )
    return value.to(q.device)


def _load(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: torch.Tensor) -> None:
    for source in (k, v):
        torch.empty(source.shape, dtype=source.dtype, device=q.device).copy_(
            source, non_blocking=True
        )


class _Framework:
    """What a framework's own code does between two calls of torch, in small."""

    def __init__(self) -> None:
        self._tensor = torch.zeros(2, 3, dtype=torch.float16)
        self._held: list[tuple[int, str] | None] = [None] * 8
        self._queues: dict[str, list[tuple[int, ...]]] = {"load": [], "store": []}
        self._names: list[str] = []
        self.count = 0

    @contextlib.contextmanager
    def _on(self, name: str) -> Iterator[None]:
        self._names.append(name)
        try:
            yield
        finally:
            self._names.pop()

    def _store(self, at: int, value: tuple[int, str]) -> None:
        self._held[at] = value

    def _take(self, at: int) -> tuple[int, str]:
        value, self._held[at] = self._held[at], None
        assert value is not None
        return value

    def _turn(self, name: str, *rest: int, keep: bool) -> tuple[int, ...]:
        queue = self._queues[name]
        if isinstance(rest[0], int) and keep:
            queue.append(rest)
        return queue.pop()

    def _move(self, at: int, name: str) -> int:
        with self._on(name):
            self._store(at, (at, name))
            turn = self._turn(name, at, keep=True)
            first, _ = self._take(at)
            rows, width = self._tensor.shape
            if self._tensor.device.type == "cpu" and self._tensor.data.dtype is torch.float16:
                first += rows * width
            self.count += len(turn) + first
        return self.count

    def work(self) -> None:
        # Few turns: code that is repeated is found in the caches.
        self._move(0, "load")
        self._move(1, "store")

    def instructions(self) -> int:
        """Of the interpreter, in :meth:`work`."""
        counted = 0

        def count(frame: FrameType, event: str, _: object) -> Any:
            nonlocal counted
            frame.f_trace_opcodes = True
            counted += event == "opcode"
            return count

        before = sys.gettrace()
        sys.settrace(count)
        try:
            self.work()
        finally:
            sys.settrace(before)
        return counted


_SMALL_CALLS = 16


def _small_calls(x: torch.Tensor, cache: torch.Tensor) -> None:
    """As many calls on few elements, no two in a row of the same."""
    width = x.shape[2]
    ones = cache.view(-1)[:width]
    y = functional.layer_norm(x, (width,), weight=ones, bias=ones) * 0.5
    y.view(1, 1, -1, _HEAD_DIM).permute(0, 2, 1, 3).reshape(-1, 1, _HEAD_DIM)
    row = y.view(1, 1, -1, _HEAD_DIM).permute(1, 0, 2, 3).reshape(1, -1, _HEAD_DIM)
    cache[1:2].copy_(row)
    x.add_(y).mul_(0.5)
    functional.relu(y, inplace=True).transpose(1, 2)


def _calls(device: torch.device, clock: _Clock) -> tuple[Estimate, Estimate, Estimate]:
    x = torch.ones(1, 1, 12 * _HEAD_DIM, dtype=torch.float16, device=device)
    cache = torch.ones(4, 12, _HEAD_DIM, dtype=torch.float16, device=device)
    many = torch.ones(_LARGE_ELEMENTS, dtype=torch.float16, device=device)
    framework = _Framework()
    small = _scaled(clock(lambda: _small_calls(x, cache)), 1 / _SMALL_CALLS)
    large = _scaled(clock(lambda: functional.relu_(many)), 1 / (4 * _LARGE_ELEMENTS))
    return small, large, _scaled(clock(framework.work), 1 / framework.instructions())


def _scaled(value: Estimate, by: float) -> Estimate:
    return Estimate(value.median * by, value.low * by, value.high * by, value.samples)
