"""Caches of a fixed length in tiers: of any type, and refused where they are too short."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, StaticCache

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import offload
from cxl_offload.integrations.transformers.cache import kept_tensors
from cxl_offload.memory import Session

from .models import generate, make, prompts

CXL = {"kv": "bind:2"}
PROMPT, NEW = 20, 10
NEEDED = PROMPT + NEW - 1
"""The last token that is generated is never read."""


def fixed(model: PreTrainedModel, positions: int = NEEDED) -> StaticCache:
    return StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=positions)


def whole(ids: torch.Tensor, cache: StaticCache) -> dict[str, Any]:
    mask = torch.ones_like(ids)
    return {"input_ids": ids, "attention_mask": mask, "past_key_values": cache}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_cache_of_just_enough_positions_serves_and_one_less_is_refused(
    family: str, session: Session
) -> None:
    """In gemma3 the layers with a window come first: they too have nothing of that step."""
    model = make(family)
    stock = generate(model, "sdpa", past_key_values=fixed(model))
    short = fixed(model, NEEDED - 1)
    with offload(model, CXL, session=session):
        assert torch.equal(generate(model, past_key_values=fixed(model)), stock)
        with pytest.raises(ConfigError, match="max_cache_len=29 or more, prompt") as caught:
            generate(model, past_key_values=short)
    assert "fixed cache of 28 positions has 28, and 1 more do not fit" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert {int(layer.get_seq_length()) for layer in short.layers} == {NEEDED - 1}
    del short


def test_prompt_longer_than_the_cache_is_refused_before_anything_is_written(
    session: Session,
) -> None:
    model = make("llama")
    cache = fixed(model, PROMPT - 1)
    with offload(model, CXL, session=session), pytest.raises(ConfigError, match="has 0, and 20"):
        generate(model, past_key_values=cache)
    assert kept_tensors(cache) == []
    assert not session.stats().nodes


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, "int4"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("way", ["greedy", "beams", "parts"])
def test_small_types_give_the_tokens_of_a_cache_that_grows(
    family: str, kv_dtype: Any, way: str, session: Session
) -> None:
    model = make(family)
    kept: dict[str, Any] = {"kv_dtype": kv_dtype, "rows_at_once": 3 if way == "parts" else None}
    asked = {"num_beams": 3} if way == "beams" else {}
    with offload(model, CXL, session=session) as done:
        generate(model, cache_implementation="static", **asked)
        exact = done.store.use()[("kv", "host")].peak_bytes
    with offload(model, CXL, session=session, **kept) as done:
        growing = generate(model, **asked)
    with offload(model, CXL, session=session, **kept) as done:
        tokens = generate(model, cache_implementation="static", **asked)
        assert done.calls.kernel > 0
        assert not done.calls.own
        assert done.store.use()[("kv", "host")].peak_bytes < 0.6 * exact
    assert torch.equal(tokens, growing)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("before", [5, PROMPT])
def test_cache_from_before_the_block_goes_on_in_the_tier(
    family: str, before: int, session: Session
) -> None:
    """Shorter than the window, and past it."""
    model = make(family)
    ids = prompts()["input_ids"][2:4]
    stock = generate(model, "sdpa", **whole(ids, fixed(model)))
    cache = fixed(model)
    with torch.no_grad():
        model(ids[:, :before], past_key_values=cache)
    if before == PROMPT:
        ids = stock[:, : PROMPT + 1]
    with offload(model, CXL, session=session):
        new = PROMPT + NEW - ids.shape[1]
        tokens = generate(model, **whole(ids, cache), max_new_tokens=new)
        for tensor in kept_tensors(cache):
            placed = session.placement(tensor.data_ptr(), tensor[0, 0].nbytes)
            assert set(placed.granted) == {2}
    assert torch.equal(tokens, stock)
    del cache, tensor


def test_reset_cache_serves_the_next_prompt_in_the_same_memory(session: Session) -> None:
    model = make("llama")
    ids = prompts()["input_ids"][2:4]
    with offload(model, CXL, session=session):
        cache = fixed(model)
        first = generate(model, **whole(ids, cache))
        addresses = [each.data_ptr() for each in kept_tensors(cache)]
        cache.reset()
        other = generate(model, **whole(ids.flip(0), cache))
        assert [each.data_ptr() for each in kept_tensors(cache)] == addresses
        del cache
    assert torch.equal(other, first.flip(0))
    assert torch.equal(first, generate(model, "sdpa", **whole(ids, fixed(model))))
