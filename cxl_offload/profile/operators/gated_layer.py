"""What a decoder layer of transformers does between its products, timed in its sequence.

A stack of plain layers in bfloat16 whose weights are larger than any cache: norms in single
precision, rotary positions, new rows of the cache, attention, the gated activation. Few rows say
what a call takes, many what a row takes. No framework runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch.nn import functional

from cxl_offload.ops.attention import decode_attention
from cxl_offload.profile.curves import estimate
from cxl_offload.profile.operators.decoder_layer import HEAD_DIM, Clock, Label, Stopwatch
from cxl_offload.profile.operators.model import Piece, PiecePoint

WIDTH, INNER, VOCABULARY = 1024, 2816, 8192
_LAYERS = 7
"""Together many times what a core has of a last-level cache."""

_DECODED = ((1, 1), (16, 1), (64, 1))
_PROMPT = (8, 128)
"""Sequences, and tokens of each that are computed together."""

_POSITIONS = (33, 257)
"""Lengths of caches, alternately: attention takes a time by its rows and one by their bytes."""

_TURNS = 4
_LEAST_S = 1e-9


class GatedLayer:
    """Weights of one layer, its cache, and what times them.

    Parameters
    ----------
    rows
        Sequences.
    """

    def __init__(self, watch: Stopwatch, rows: int) -> None:
        self._watch = watch
        shapes = [(WIDTH, WIDTH)] * 4 + [(INNER, WIDTH)] * 2 + [(WIDTH, INNER)]
        self._matrices = [torch.full(shape, 0.01, dtype=torch.bfloat16) for shape in shapes]
        self._norm = torch.ones(WIDTH, dtype=torch.bfloat16)
        shape = (rows, WIDTH // HEAD_DIM, max(_POSITIONS) + 1, HEAD_DIM)
        self._cache = [torch.full(shape, 0.01, dtype=torch.bfloat16) for _ in "kv"]

    def run(self, x: torch.Tensor, positions: int) -> torch.Tensor:
        """``x (rows, tokens, width)``; ``positions`` of the cache, for single tokens."""
        watch, (to_q, to_k, to_v, to_out, gate, up, down) = self._watch, self._matrices
        y = self._normed(x)
        q, k, v = (functional.linear(y, each) for each in (to_q, to_k, to_v))
        watch.begin()
        q, k, v = (each.view(*each.shape[:2], -1, HEAD_DIM).transpose(1, 2) for each in (q, k, v))
        turn = torch.ones(1, 1, x.shape[1], HEAD_DIM, dtype=torch.bfloat16)
        q, k = (each * turn + _turned(each) * turn for each in (q, k))
        watch.end("rotary")
        attended = self._attended(q, k, v, positions)
        x = self._added(x, functional.linear(attended, to_out))
        y = self._normed(x)
        gated, raised = functional.linear(y, gate), functional.linear(y, up)
        watch.begin()
        inner = functional.silu(gated) * raised
        watch.end("gate")
        return self._added(x, functional.linear(inner, down))

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

    def _attended(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: int
    ) -> torch.Tensor:
        """By torch over a prompt; over the cache where it lies for single tokens."""
        self._watch.begin()
        rows, _, tokens, _ = q.shape
        if tokens > 1:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            out = out.transpose(1, 2).reshape(rows, tokens, -1)
            self._watch.end("prompt attention")
            return out
        for cache, new in zip(self._cache, (k, v), strict=True):
            cache[:, :, positions - 1 : positions] = new
        keys, values = (cache[:, :, :positions] for cache in self._cache)
        out = decode_attention(q[:, :, 0], keys, values, scale=HEAD_DIM**-0.5)
        short = positions == min(_POSITIONS)
        self._watch.end("short attention" if short else "long attention")
        return out.to(q.dtype).reshape(rows, 1, -1)


def _turned(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


@torch.no_grad()
def measure_pieces(clock: Clock) -> tuple[PiecePoint, ...]:
    """A point for every piece and number of rows.

    Parameters
    ----------
    clock
        Seconds since any moment.
    """
    watch = Stopwatch(torch.device("cpu"), clock)
    return tuple(
        point for rows, tokens in (*_DECODED, _PROMPT) for point in _points(watch, rows, tokens)
    )


def _points(watch: Stopwatch, rows: int, tokens: int) -> Iterator[PiecePoint]:
    count = _LAYERS if tokens == 1 else 1
    layers = [GatedLayer(watch, rows) for _ in range(count)]
    samples: defaultdict[Label, list[float]] = defaultdict(list)
    x = torch.full((rows, tokens, WIDTH), 0.5, dtype=torch.bfloat16)
    for turn in range(_TURNS + 1):
        for layer in layers:
            watch.reset()
            layer.run(x, _POSITIONS[turn % len(_POSITIONS)])
            _keep(samples, watch, turn)
        if tokens == 1:
            watch.reset()
            _logits(watch, rows)
            _keep(samples, watch, turn)
    for name, elements in elements_of(tokens).items():
        if name in samples:
            yield PiecePoint(name, rows * tokens, elements, estimate(samples[name]))


def _keep(samples: defaultdict[Label, list[float]], watch: Stopwatch, turn: int) -> None:
    """All turns but the first, before which nothing was ever used."""
    if turn:
        for label, taken in watch.seconds.items():
            samples[label].append(max(taken, _LEAST_S))


def _logits(watch: Stopwatch, rows: int) -> None:
    """The likeliest token of every row."""
    made = torch.full((rows, VOCABULARY), 0.5, dtype=torch.bfloat16)
    watch.begin()
    made.float().argmax(dim=-1)
    watch.end("logits")


def elements_of(tokens: int) -> dict[Piece, int]:
    """What a row of a layer counts as, by piece; of attention over a prompt its operations."""
    short, long = _POSITIONS
    return {
        "norm": WIDTH,
        "rotary": 2 * WIDTH,
        "gate": INNER,
        "logits": VOCABULARY,
        "short attention": 2 * short * WIDTH,
        "long attention": 2 * long * WIDTH,
        "prompt attention": 4 * tokens * WIDTH,
    }
