"""A LLaMA with random weights, and the seconds of its prompts and of its tokens.

Decode steps are those of ``generate()`` over a cache that already has its positions: random numbers
in place of a prompt's, which take as long to attend to and cost no prompt. Prompts are measured
apart, with fewer layers where they are long, since every layer does the same work.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

from cxl_offload import _C

VOCAB = 4096
_MANY_ROWS = 512
"""Of a product that takes as long as its arithmetic: each weight is read once for all of them."""

LEAST_ROUNDS = 3
_PROMPT = 1
_LEAST_PROBED = 1 << 20

Way = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Pace:
    """How long to measure: so many rounds, or until the seconds are over and three are done."""

    rounds: int
    seconds: float
    now: Callable[[], float]


class Clock(StoppingCriteria):  # type: ignore[misc]
    """Reads the time after every token, and never stops.

    ``after_token`` is done outside of the time.
    """

    def __init__(self, now: Callable[[], float], after_token: Callable[[], None] | None) -> None:
        self._now = now
        self._after_token = after_token
        self._outside = 0.0
        self.times = [now()]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        read = self._now()
        self.times.append(read - self._outside)
        if self._after_token is not None:
            self._after_token()
            self._outside += self._now() - read
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def make_model(args: argparse.Namespace, kv_heads: int) -> LlamaForCausalLM:
    """In bfloat16; two calls give the same weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=args.hidden,
        intermediate_size=args.inner,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.set_attn_implementation("sdpa")
    return model


@contextlib.contextmanager
def first_layers(model: LlamaForCausalLM, count: int) -> Iterator[None]:
    """Only so many of the layers are computed."""
    config, before = model.config, model.config.num_hidden_layers
    config.num_hidden_layers = min(count, before)
    try:
        yield
    finally:
        config.num_hidden_layers = before


def random_ids(batch: int, length: int) -> torch.Tensor:
    """The same ones at every call."""
    numbers = torch.Generator().manual_seed(_PROMPT)
    return torch.randint(3, VOCAB, (batch, length), generator=numbers)


def _generated(model: LlamaForCausalLM, ids: torch.Tensor, clock: Clock, **more: Any) -> None:
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([clock]),
        **more,
    )


def prefill_seconds(
    model: LlamaForCausalLM, way: Way, ids: torch.Tensor, now: Callable[[], float]
) -> float:
    """Of ``generate()`` of one token."""
    with way():
        clock = Clock(now, None)
        _generated(model, ids, clock, max_new_tokens=1)
    return clock.times[1] - clock.times[0]


def _filled_cache(model: LlamaForCausalLM, batch: int, positions: int) -> DynamicCache:
    config = model.config
    shape = (batch, config.num_key_value_heads, positions, config.head_dim)
    numbers = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(shape, generator=numbers, dtype=torch.bfloat16) for _ in "kv")
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        cache.update(keys, values, layer)
    return cache


def decode_seconds(
    model: LlamaForCausalLM,
    way: Way,
    ids: torch.Tensor,
    new: int,
    now: Callable[[], float],
    after_token: Callable[[], None] | None = None,
) -> float:
    """Of a decode step; the first one, in which caches find their place, is left out."""
    with way():
        cache = _filled_cache(model, ids.shape[0], ids.shape[1] - 1)
        clock = Clock(now, after_token)
        _generated(model, ids, clock, max_new_tokens=new, past_key_values=cache)
    return (clock.times[-1] - clock.times[1]) / (new - 1)


def weight_bytes(model: LlamaForCausalLM) -> int:
    """What a decode step reads of weights: all but the table of words."""
    return sum(weight.nbytes for weight in _weights_of_a_step(model))


def cache_bytes(model: LlamaForCausalLM, batch: int, positions: int) -> int:
    """What a decode step reads of keys and values: all."""
    config = model.config
    heads = config.num_hidden_layers * config.num_key_value_heads
    return batch * positions * heads * config.head_dim * 2 * torch.bfloat16.itemsize


def _weights_of_a_step(model: LlamaForCausalLM) -> list[torch.Tensor]:
    table = model.get_input_embeddings().weight
    return [weight for weight in model.parameters() if weight is not table]


def bound_seconds(model: LlamaForCausalLM, nbytes: int, threads: int) -> float:
    """In which pinned threads read so many bytes, at the rate at which they read the weights."""
    once, cpus = _C.Traffic(reads=1, writes=0, passes=1), _C.allowed_cpus()[:threads]
    seconds = read = 0.0
    for weight in _weights_of_a_step(model):
        if weight.nbytes >= _LEAST_PROBED:
            done = _C.run_traffic(weight.data_ptr(), weight.nbytes, once, cpus)
            read += sum(each.bytes_read for each in done)
            seconds += max(each.seconds for each in done)
    return seconds * nbytes / read


def arithmetic_seconds(model: LlamaForCausalLM, rows: int, now: Callable[[], float]) -> float:
    """In which torch multiplies so many rows by all weights, at its rate with many rows.

    The rate is that of a layer's weights, one after the other; others are of like shapes.
    """
    layer = [weight for weight in model.model.layers[0].parameters() if weight.dim() == 2]
    given = {w.shape[1]: torch.ones(_MANY_ROWS, w.shape[1], dtype=w.dtype) for w in layer}
    start = now()
    for weight in layer:
        torch.nn.functional.linear(given[weight.shape[1]], weight)
    seconds = now() - start
    numbers = sum(weight.numel() for weight in _weights_of_a_step(model) if weight.dim() == 2)
    measured = sum(weight.numel() for weight in layer)
    return seconds * (numbers / measured) * (rows / _MANY_ROWS)


def in_turns(steps: Mapping[str, Callable[[], float]], pace: Pace) -> dict[str, list[float]]:
    """Seconds that each step returns, taken in turns.

    The first turn warms memory and threads, and is not kept.
    """
    samples: dict[str, list[float]] = {name: [] for name in steps}
    begin = time.monotonic()
    for turn in range(pace.rounds + 1):
        for name in sorted(steps, reverse=turn % 2 == 0):
            took = steps[name]()
            if turn:
                samples[name].append(took)
        if turn >= LEAST_ROUNDS and time.monotonic() - begin > pace.seconds:
            break
    return samples
