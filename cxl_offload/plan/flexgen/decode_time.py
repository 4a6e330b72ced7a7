"""Seconds of one decoded token of FlexGen, from operators measured on the accelerator.

The equations of :mod:`cxl_offload.plan.decoding.phases` ask for a GPU's peaks. Here every term is a
sum of measured operators, so they hold for whatever computes, a CPU in a GPU's place included::

    token = layers * batches * (4 linear(h, h) + 2 linear(h, ffn) + attention)
          + (layers + 1) * batches * (small calls + Python)
          + layers * load(weights on the host) + batches * linear(h, vocabulary)

Range of validity: OPT's shape in half precision, weights and KV cache on host or accelerator (no
disk, no compression), copies that do not overlap with work (on the CPU they cannot; on a GPU the
result is an upper bound of the time), and sizes near those that the profile measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cxl_offload.profile.operators.model import OperatorProfile

KvHome = Literal["accelerator", "host, in place", "host, loaded"]
"""Where keys and values are, and for those on the host whether the CPU attends to them there or
they are loaded to the accelerator for every token."""

_HALF = 2

CALLS: dict[KvHome, tuple[int, int]] = {
    "accelerator": (31, 4150),
    "host, in place": (37, 4900),
    "host, loaded": (35, 4800),
}
"""Calls of torch, and instructions of the Python interpreter, of one layer (attention and MLP)
beside the operators that are counted apart: flexgen 0.1.8 with this package on Python 3.11, counted
with ``sys.settrace`` and in torch's dispatcher (tests/integrations/flexgen/test_decode_time.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeShape:
    """What is decoded, and where its tensors are.

    Attributes
    ----------
    rows
        Sequences of one GPU batch.
    batches
        GPU batches that share the loading of a layer's weights.
    attended
        Positions that a token attends to, on average.
    host_weights
        Share of the weights whose home is the host, 0 to 1.
    """

    layers: int
    hidden: int
    ffn: int
    vocabulary: int
    rows: int
    batches: int = 1
    attended: float
    kv: KvHome = "accelerator"
    host_weights: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """Seconds of one token of every sequence, and what they are made of."""

    token_s: float
    terms: Mapping[str, float]
    sequences: int

    @property
    def tokens_per_s(self) -> float:
        """Of all sequences together."""
        return self.sequences / self.token_s


def decode_time(shape: DecodeShape, operators: OperatorProfile) -> DecodeTime:
    """What the operators add up to.

    Raises
    ------
    ValueError
        A count that is not above 0, or a share outside 0..1.
    """
    counts = (shape.layers, shape.hidden, shape.ffn, shape.vocabulary, shape.rows, shape.batches)
    if min(counts) < 1 or not shape.attended > 0 or not 0 <= shape.host_weights <= 1:
        raise ValueError(f"{shape}: counts must be above 0, host_weights 0 to 1")
    each = shape.layers * shape.batches
    square = _HALF * shape.hidden**2
    inner = _HALF * shape.hidden * shape.ffn
    linear = 4 * operators.linear_s(shape.rows, square)
    linear += 2 * operators.linear_s(shape.rows, inner)
    output = _HALF * shape.hidden * shape.vocabulary
    of_torch, of_python = CALLS[shape.kv]
    between = of_torch * operators.call_s(shape.rows, shape.hidden)
    between += of_python * operators.python_instruction_s(shape.rows, shape.hidden)
    terms = {
        "linear layers": each * linear,
        "output layer": shape.batches * operators.linear_s(shape.rows, output),
        "attention": each * _attention_s(shape, operators),
        "weights loaded": shape.layers * shape.host_weights * _weights_s(square, inner, operators),
        # Embedding and output are two layers of FlexGen's, as attention and MLP are.
        "between products": (each + shape.batches) * between,
    }
    return DecodeTime(sum(terms.values()), terms, shape.rows * shape.batches)


def _attention_s(shape: DecodeShape, operators: OperatorProfile) -> float:
    cache = 2 * _HALF * shape.rows * shape.attended * shape.hidden
    if shape.kv == "host, in place":
        return operators.cache_s("attention in place", cache)
    seconds = operators.cache_s("copied attention", cache)
    if shape.kv == "host, loaded":
        seconds += operators.cache_s("load", cache)
    return seconds


def _weights_s(square: float, inner: float, operators: OperatorProfile) -> float:
    """One matrix after the other; the operator was measured on pairs."""
    return sum(
        count * operators.cache_s("load", 2 * nbytes) / 2
        for count, nbytes in ((4, square), (2, inner))
    )
