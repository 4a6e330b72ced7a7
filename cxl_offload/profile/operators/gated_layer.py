"""What decoders of transformers do in a layer, timed in its sequence.

A stack of plain layers in bfloat16 whose weights are larger than the caches: products, norms in
single precision, rotary positions, new rows of the cache, attention, the gated activation. Few rows
say what a call takes, many what a row takes. Products that are timed in a loop of their own look
an eighth faster than between these calls (measured). No framework runs.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from mmap import mmap

import torch
from torch.nn import functional

from cxl_offload.ops.attention import decode_attention
from cxl_offload.profile.curves import estimate
from cxl_offload.profile.operators.decoder_layer import HEAD_DIM, Clock, Label, Stopwatch
from cxl_offload.profile.operators.model import Piece, PiecePoint, ProductPoint

WIDTHS = (1024, 2048)
"""Of layers, in ascending order; pieces between products are those of the first."""

VOCABULARY = 8192

_DECODED = (1, 4, 16, 64)
_PROMPTS, _TOKENS = (2, 8), 128
"""Prompts that are computed together, and tokens of each. Processors multiply many rows faster than
few."""

_POSITIONS = (33, 257)
"""Lengths of caches, alternately: attention takes a time by its rows and one by their bytes."""

_VISITS, _LEAST_VISITS, _FIRST = 24, 4, 4
"""Most layers that are timed with a number of rows, the least, and those before that are not."""

_LOGITS, _PROMPT_VISITS = 4, 8

_ENOUGH_S = 1.0
"""After so long no more layers than the least are timed. One of a prompt takes seconds where the
processor has no arithmetic for bfloat16, and its first visit then counts."""

LEAST_S = 1e-9


def inner_of(width: int) -> int:
    """Of the gated activation."""
    return width * 11 // 4


@dataclass(frozen=True, slots=True)
class GatedPoints:
    """Everything of a stack of layers."""

    pieces: tuple[PiecePoint, ...]
    products: tuple[ProductPoint, ...]


class GatedLayer:
    """Weights of one layer, and what times them.

    Parameters
    ----------
    width
        Of a token.
    """

    def __init__(self, watch: Stopwatch, width: int) -> None:
        self._watch = watch
        shapes = [(width, width)] * 4 + [(inner_of(width), width)] * 2 + [(width, inner_of(width))]
        self._matrices = [torch.full(shape, 0.01, dtype=torch.bfloat16) for shape in shapes]
        self._norm = torch.ones(width, dtype=torch.bfloat16)

    def run(self, x: torch.Tensor, caches: Sequence[torch.Tensor], positions: int) -> torch.Tensor:
        """``x (rows, tokens, width)``; ``positions`` of the keys and values, for single tokens."""
        watch, (to_q, to_k, to_v, to_out, gate, up, down) = self._watch, self._matrices
        y = self._normed(x)
        q, k, v = (self._product("square", y, each) for each in (to_q, to_k, to_v))
        watch.begin()
        q, k, v = (each.view(*each.shape[:2], -1, HEAD_DIM).transpose(1, 2) for each in (q, k, v))
        turn = torch.ones(1, 1, x.shape[1], HEAD_DIM, dtype=torch.bfloat16)
        q, k = (each * turn + _turned(each) * turn for each in (q, k))
        watch.end("rotary")
        if x.shape[1] > 1:
            attended = self._attended_prompt(q, k, v)
        else:
            attended = self._attended(q, (k, v), caches, positions)
        x = self._added(x, self._product("square", attended, to_out))
        y = self._normed(x)
        gated, raised = self._product("inner", y, gate), self._product("inner", y, up)
        watch.begin()
        inner = functional.silu(gated) * raised
        watch.end("gate")
        return self._added(x, self._product("inner", inner, down))

    def _product(self, label: Label, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        self._watch.begin()
        result = functional.linear(x, matrix)
        self._watch.end(label)
        return result

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        self._watch.begin()
        single = x.float()
        single = single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + 1e-6)
        result = self._norm * single.to(x.dtype)
        self._watch.end("norm")
        return result

    def _added(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self._watch.begin()
        result = x + y
        self._watch.end("norm")
        return result

    def _attended_prompt(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """By torch; its keys and values are stored in memory that nobody had before."""
        self._watch.begin()
        for each in (k, v):
            room = torch.frombuffer(mmap(-1, each.nbytes), dtype=each.dtype)
            room.view(each.shape).copy_(each)
        self._watch.end("prompt store")
        self._watch.begin()
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)
        self._watch.end("prompt attention")
        return out

    def _attended(
        self,
        q: torch.Tensor,
        new: Sequence[torch.Tensor],
        caches: Sequence[torch.Tensor],
        positions: int,
    ) -> torch.Tensor:
        """Over the cache where it lies, by this package's kernel."""
        watch = self._watch
        watch.begin()
        for cache, row in zip(caches, new, strict=True):
            cache[:, :, positions - 1 : positions] = row
        keys, values = (cache[:, :, :positions] for cache in caches)
        watch.end("store")
        watch.begin()
        out = decode_attention(q[:, :, 0], keys, values, scale=HEAD_DIM**-0.5)
        watch.end("short attention" if positions == min(_POSITIONS) else "long attention")
        return out.to(q.dtype).reshape(q.shape[0], 1, -1)


def _turned(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


@torch.no_grad()
def measure_gated(clock: Clock, ring_bytes: int) -> GatedPoints:
    """Products of a layer and what lies between them, of few rows and of prompts.

    Parameters
    ----------
    clock
        Seconds since any moment.
    ring_bytes
        More than the processor's caches hold.
    """
    watch = Stopwatch(torch.device("cpu"), clock)
    pieces: list[PiecePoint] = []
    products: list[ProductPoint] = []
    for width in WIDTHS:
        nbytes = 2 * width * (4 * width + 3 * inner_of(width))
        layers = [GatedLayer(watch, width) for _ in range(max(2, -(-ring_bytes // nbytes)))]
        visits = itertools.cycle(layers)
        for rows in _DECODED:
            samples = _decoded(watch, visits, width, rows, ring_bytes)
            products += _products(samples, width, rows)
            if width == WIDTHS[0]:
                pieces += _pieces(samples, rows, 1)
        for prompts in _PROMPTS:
            samples = _prompt(watch, visits, width, prompts)
            products += _products(samples, width, prompts * _TOKENS)
        if width == WIDTHS[0]:
            pieces += _pieces(samples, prompts, _TOKENS)
    return GatedPoints(tuple(pieces), tuple(products))


SampleLists = defaultdict[Label, list[float]]


def _decoded(
    watch: Stopwatch, visits: Iterator[GatedLayer], width: int, rows: int, ring_bytes: int
) -> SampleLists:
    """Seconds by label of layers that get one token of every row."""
    samples: SampleLists = defaultdict(list)
    shape = (rows, width // HEAD_DIM, max(_POSITIONS) + 1, HEAD_DIM)
    nbytes = 4 * rows * width * max(_POSITIONS)
    count = min(_VISITS, max(2, -(-ring_bytes // nbytes)))
    caches = [[torch.full(shape, 0.01, dtype=torch.bfloat16) for _ in "kv"] for _ in range(count)]
    x = torch.full((rows, 1, width), 0.5, dtype=torch.bfloat16)
    begun = time.perf_counter()
    for visit in range(_FIRST + _VISITS):
        if visit >= _FIRST + _LEAST_VISITS and time.perf_counter() - begun > _ENOUGH_S:
            break
        watch.reset()
        next(visits).run(x, caches[visit % count], _POSITIONS[visit // 2 % 2])
        if visit >= _FIRST:
            _keep(samples, watch)
    for _ in range(_LOGITS):
        watch.reset()
        _logits(watch, rows)
        _keep(samples, watch)
    return samples


def _prompt(
    watch: Stopwatch, visits: Iterator[GatedLayer], width: int, prompts: int
) -> SampleLists:
    """The same of layers that get so many prompts."""
    samples: SampleLists = defaultdict(list)
    x = torch.full((prompts, _TOKENS, width), 0.5, dtype=torch.bfloat16)
    begun = time.perf_counter()
    for visit in range(1 + _PROMPT_VISITS):
        watch.reset()
        next(visits).run(x, (), 0)
        is_long = time.perf_counter() - begun > _ENOUGH_S
        if visit or is_long:
            _keep(samples, watch)
        if is_long:
            break
    return samples


def _keep(samples: SampleLists, watch: Stopwatch) -> None:
    for label, taken in watch.seconds.items():
        samples[label].append(max(taken, LEAST_S))


def _logits(watch: Stopwatch, rows: int) -> None:
    """The likeliest token of every row."""
    made = torch.full((rows, VOCABULARY), 0.5, dtype=torch.bfloat16)
    watch.begin()
    made.float().argmax(dim=-1)
    watch.end("logits")


def _pieces(samples: SampleLists, rows: int, tokens: int) -> Iterator[PiecePoint]:
    for name, elements in elements_of(tokens).items():
        if name in samples:
            yield PiecePoint(name, rows * tokens, elements, estimate(samples[name]))


def _products(samples: SampleLists, width: int, rows: int) -> Iterator[ProductPoint]:
    sizes: dict[Label, tuple[int, int]] = {"square": (width, 4), "inner": (inner_of(width), 3)}
    for label, (inner, count) in sizes.items():
        each = [taken / count for taken in samples[label]]
        yield ProductPoint(rows, 2 * width * inner, estimate(each))


def elements_of(tokens: int) -> dict[Piece, int]:
    """What a row of a layer counts as, by piece; of attention over a prompt its operations."""
    width, (short, long) = WIDTHS[0], _POSITIONS
    return {
        "norm": width,
        "rotary": 2 * width,
        "gate": inner_of(width),
        "logits": VOCABULARY,
        "store": width,
        "short attention": 2 * short * width,
        "long attention": 2 * long * width,
        "prompt store": width,
        "prompt attention": 4 * tokens * width,
    }
