"""A plain decoder layer of torch that times its operators in their sequence.

Operators that are timed in loops of their own look faster than in a model: a call between two
products finds its instructions, its operands and the memory that it writes to pushed out of the
caches by weights, and takes two to five times as long. So a stack of layers is run whose weights
are larger than any cache, and a clock is read around each operator. No framework runs.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from cxl_offload.profile.operators.cache_operators import (
    CacheLoader,
    attention_in_place,
    copied_attention,
)
from cxl_offload.profile.operators.framework_code import FrameworkCode
from cxl_offload.profile.operators.model import CacheOperator, Piece

HEAD_DIM = 64

CALLS = 28
"""Calls of torch in a layer besides products and attention; a test counts them."""

Clock = Callable[[], float]
Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Label = Literal["square", "inner", "calls", "python"] | CacheOperator | Piece


class Stopwatch:
    """Sums seconds by label; what reading the clock takes is taken off.

    Attributes
    ----------
    seconds
        By label, since :meth:`reset`.
    """

    def __init__(self, device: torch.device, clock: Clock = time.perf_counter) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._clock = clock
        self._own = 0.0
        self._begun = 0.0
        empty = []
        for _ in range(99):
            self.reset()
            self.begin()
            self.end("calls")
            empty.append(self.seconds["calls"])
        self._own = sorted(empty)[len(empty) // 2]
        self.reset()

    def reset(self) -> None:
        """Forget all labels."""
        self.seconds: defaultdict[Label, float] = defaultdict(float)

    def begin(self) -> None:
        """Starts the clock."""
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
        self._begun = self._clock()

    def end(self, label: Label) -> None:
        """Up to here, waited for."""
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
        self.seconds[label] += self._clock() - self._begun - self._own


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values ``(positions + 1, columns, dim)`` in host memory and on the device.

    On the CPU both are the same.
    """

    home: tuple[torch.Tensor, torch.Tensor]
    there: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Decoding:
    """How a token is computed, and who times it.

    Attributes
    ----------
    mask
        ``(rows, positions)``, bool, on the device.
    in_place
        Attention over the cache in host memory; else over copies, and the cache is loaded too.
    """

    watch: Stopwatch
    linear: Linear
    mask: torch.Tensor
    load: CacheLoader
    in_place: bool

    def product(
        self, label: Label, x: torch.Tensor, matrix: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """A linear layer, timed."""
        self.watch.begin()
        result = self.linear(x, *matrix)
        self.watch.end(label)
        return result

    def run(self, pieces: Sequence[FrameworkCode]) -> None:
        """Python code, timed."""
        self.watch.begin()
        for piece in pieces:
            piece.work()
        self.watch.end("python")


class DecoderLayer:
    """Weights of one layer, and the objects that a framework keeps for it.

    Parameters
    ----------
    codes
        Classes of Python code; the layer makes objects of its own of each.
    """

    def __init__(
        self, hidden: int, device: torch.device, codes: Sequence[type[FrameworkCode]]
    ) -> None:
        ones = torch.ones(hidden, dtype=torch.float16, device=device)
        self._hidden = hidden
        self._norms = [(ones.clone(), torch.zeros_like(ones)) for _ in range(2)]
        inner = 4 * hidden
        shapes = [(hidden, hidden)] * 4 + [(inner, hidden), (hidden, inner)]
        self._matrices = [
            (
                torch.full(shape, 0.01, dtype=torch.float16, device=device),
                torch.zeros(shape[0], dtype=torch.float16, device=device),
            )
            for shape in shapes
        ]
        objects = [code() for code in codes]
        ends = [len(objects) * tenth // 10 for tenth in (0, 3, 5, 8, 10)]
        self._python = [objects[a:b] for a, b in itertools.pairwise(ends)]

    def decode(
        self, x: torch.Tensor, cache: LayerCache, following: LayerCache, how: Decoding
    ) -> torch.Tensor:
        """One token: ``x (rows, 1, hidden)``; ``following`` is the next layer's cache."""
        if not how.in_place:
            how.watch.begin()
            how.load(*(each[:-1] for each in following.home))
            how.watch.end("load")
        return self._feed_forward(self._attend(x, cache, how), how)

    def _attend(self, x: torch.Tensor, cache: LayerCache, how: Decoding) -> torch.Tensor:
        rows, _, hidden = x.shape
        watch = how.watch
        to_q, to_k, to_v, to_out = self._matrices[:4]
        how.run(self._python[0])
        watch.begin()
        y = functional.layer_norm(x, (hidden,), *self._norms[0])
        watch.end("calls")
        q = how.product("square", y, to_q)
        watch.begin()
        q = q * HEAD_DIM**-0.5
        watch.end("calls")
        k, v = how.product("square", y, to_k), how.product("square", y, to_v)
        watch.begin()
        q, k, v = (each.view(rows, 1, -1, HEAD_DIM) for each in (q, k, v))
        q = q.permute(0, 2, 1, 3).reshape(-1, 1, HEAD_DIM)
        new = [each.permute(1, 0, 2, 3).reshape(1, -1, HEAD_DIM) for each in (k, v)]
        keys, values = (each[:-1] for each in cache.there)
        keys[-1:], values[-1:] = new
        watch.end("calls")
        how.run(self._python[1])
        value = self._attention(q, cache, how)
        watch.begin()
        value = value.view(rows, -1, 1, HEAD_DIM).transpose(1, 2).view(rows, 1, hidden)
        watch.end("calls")
        out = how.product("square", value, to_out)
        watch.begin()
        out.add_(x)
        for each, row in zip(cache.there, new, strict=True):  # as a framework stores it
            each[-1:].copy_(row)
        watch.end("calls")
        how.run(self._python[2])
        return out

    def _attention(self, q: torch.Tensor, cache: LayerCache, how: Decoding) -> torch.Tensor:
        keys, values = (each[:-1] for each in (cache.home if how.in_place else cache.there))
        how.watch.begin()
        if how.in_place:
            value = attention_in_place(q, keys, values, how.mask)
            how.watch.end("attention in place")
        else:
            value = copied_attention(q, keys, values, how.mask)
            how.watch.end("copied attention")
        return value

    def _feed_forward(self, x: torch.Tensor, how: Decoding) -> torch.Tensor:
        watch = how.watch
        watch.begin()
        y = functional.layer_norm(x, (self._hidden,), *self._norms[1])
        watch.end("calls")
        y = how.product("inner", y, self._matrices[4])
        watch.begin()
        functional.relu(y, inplace=True)
        watch.end("calls")
        y = how.product("inner", y, self._matrices[5])
        watch.begin()
        y.add_(x)
        watch.end("calls")
        how.run(self._python[3])
        return y
