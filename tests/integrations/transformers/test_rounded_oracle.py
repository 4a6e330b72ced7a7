"""Caches in small types against an oracle that rounds by itself and attends in double precision.

It takes exact keys and values on their way into the cache, rounds them by what the documents say,
not by the package, and computes attention densely over all positions.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cxl_offload.integrations.transformers import offload
from cxl_offload.memory import Session

from .models import make, prompts

CXL = {"kv": "bind:2"}
GROUP = 64
NEW = 16


def numbers_of(exponent_bits: int, fraction_bits: int, bias: int, largest: float) -> torch.Tensor:
    """All numbers from 0 on of an 8-bit float type, in the order of their codes."""
    whole = 1 << fraction_bits
    found = []
    for code in range(1 << (exponent_bits + fraction_bits)):
        exponent, fraction = divmod(code, whole)
        small = fraction / whole * 2.0 ** (1 - bias)
        found.append((1 + fraction / whole) * 2.0 ** (exponent - bias) if exponent else small)
    return torch.tensor([each for each in found if each <= largest], dtype=torch.float64)


def nearest(numbers: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """The nearest number, the one with an even code of two; the largest for what is beyond."""
    size = states.double().abs().clamp(max=numbers[-1].item())
    above = torch.searchsorted(numbers, size).clamp(1, len(numbers) - 1)
    below = above - 1
    to_below, to_above = size - numbers[below], numbers[above] - size
    even = torch.where(below % 2 == 0, below, above)
    chosen = torch.where(to_below < to_above, below, torch.where(to_above < to_below, above, even))
    return numbers[chosen] * states.double().sign()


def in_codes(states: torch.Tensor) -> torch.Tensor:
    """What 4-bit codes are worth: 64 numbers have a least value and a step, both float16."""
    found = []
    for group in states.float().split(GROUP, dim=-1):
        low = group.amin(-1, keepdim=True).half()
        step = ((group.amax(-1, keepdim=True) - low.float()) / 15).half()
        codes = ((group - low.float()) / step.float().clamp(min=1e-7)).round().clamp(0, 15)
        found.append(low.double() + codes.double() * step.double())
    return torch.cat(found, dim=-1)


ROUNDED: dict[Any, Any] = {
    "int4": in_codes,
    torch.float8_e4m3fn: lambda states: nearest(numbers_of(4, 3, 7, 448.0), states),
    torch.float8_e5m2: lambda states: nearest(numbers_of(5, 2, 15, 57344.0), states),
}


class Oracle:
    """Follows the cache, and says of every step by how much attention is off."""

    def __init__(self, kept: Any, mask: torch.Tensor) -> None:
        self.rounded, self.mask = ROUNDED[kept], mask
        self.states: dict[int, tuple[torch.Tensor, ...]] = {}
        self.layer, self.errors, self.moved = 0, list[float](), list[float]()

    def update(self, layer: int, *new: torch.Tensor) -> None:
        before = self.states.get(layer)
        pairs = zip(before or new, new, strict=True)
        whole = (torch.cat(pair, dim=2) if before else pair[1].clone() for pair in pairs)
        self.states[layer], self.layer = tuple(whole), layer

    def look(self, query: torch.Tensor, out: torch.Tensor, **given: Any) -> None:
        exact = self.states[self.layer]
        if query.shape[2] == exact[0].shape[2]:
            return  # a prompt attends to what is not rounded yet
        expected = self.attend(query, *map(self.rounded, exact), **given)
        scale = expected.abs().max()
        self.errors.append(float((out.double() - expected).abs().max() / scale))
        unrounded = self.attend(query, *(each.double() for each in exact), **given)
        self.moved.append(float((unrounded - expected).abs().max() / scale))

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **given: Any
    ) -> torch.Tensor:
        groups, count = query.shape[1] // keys.shape[1], keys.shape[2]
        keys, values = (each.repeat_interleave(groups, dim=1) for each in (keys, values))
        scores = query.double() @ keys.mT * given["scaling"]
        if given.get("softcap"):
            scores = given["softcap"] * (scores / given["softcap"]).tanh()
        seen = self.mask[:, None, None, :count].bool()
        if window := given.get("sliding_window"):
            seen = seen & (torch.arange(count) > count - 1 - window)
        scores = scores.masked_fill(~seen, -math.inf)
        if (sinks := given.get("s_aux")) is not None:
            sinks = sinks.double().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        return (scores.softmax(dim=-1)[..., :count] @ values).transpose(1, 2)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kept", ROUNDED, ids=str)
@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt-oss", "gpt2"]
)
def test_every_step_attends_to_what_the_documents_say_is_kept(
    family: str, kept: Any, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = make(family), prompts()
    mask = given["attention_mask"]
    oracle = Oracle(kept, torch.cat([mask, torch.ones(len(mask), NEW, dtype=mask.dtype)], dim=1))
    update = Cache.update

    def followed(
        cache: Cache, keys: Any, values: Any, layer_idx: int, *more: Any, **named: Any
    ) -> Any:
        oracle.update(layer_idx, keys, values)
        return update(cache, keys, values, layer_idx, *more, **named)

    monkeypatch.setattr(Cache, "update", followed)
    with offload(model, CXL, kv_dtype=kept, session=session) as done:
        name = model.config.get_text_config()._attn_implementation
        computes = ALL_ATTENTION_FUNCTIONS[name]

        def looked_at(module: Any, query: torch.Tensor, *states: Any, **named: Any) -> Any:
            out = computes(module, query, *states, **named)
            window = named.get("sliding_window", getattr(module, "sliding_window", None))
            oracle.look(query, out[0], **{**named, "sliding_window": window})
            return out

        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, name, looked_at)
        model.generate(**given, max_new_tokens=NEW, do_sample=False)
        assert not done.calls.own
    assert len(oracle.errors) == (NEW - 1) * model.config.num_hidden_layers
    assert max(oracle.errors) < 5e-6  # of single precision
    assert min(oracle.moved) > 1e-3  # rounding is seen
