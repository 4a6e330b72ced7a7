"""Prompts' beginnings are kept, and read again: same tokens, and only the rest is computed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from cxl_offload.integrations.transformers import (
    offload,
)
from cxl_offload.memory import Session

from .models import FAMILIES, generate, make
from .prefix_prompts import CXL, computed_tokens, counts_of, kept, own_of, texts


@pytest.mark.sampled(9)
@pytest.mark.parametrize("way", ["greedy", "fixed cache"])
@pytest.mark.parametrize("family", FAMILIES)
def test_second_prompt_computes_only_its_rest_and_gives_the_same_tokens(
    family: str, way: str, session: Session
) -> None:
    """Also behind windows that are shorter than what was found."""
    model = make(family)
    options = {} if way == "greedy" else {"cache_implementation": "static"}
    both = texts(0, 0), texts(0, 0, seed=2)
    expected = [generate(model, own_of(family), **each, **options) for each in both]
    with offload(model, CXL, prefixes=kept(), session=session) as done:
        passes = computed_tokens(model)
        tokens = [generate(model, **each, **options) for each in both]
        counts = counts_of(done)
    assert [torch.equal(*each) for each in zip(tokens, expected, strict=True)] == [True, True]
    assert (counts.found_tokens, counts.prompt_tokens) == (2 * 24, 4 * 30)
    assert not counts.computed
    assert [count for count in passes if count > 1] == [30, 6]


@pytest.mark.parametrize("family", ["opt", "gemma3", "gpt2"])
def test_padding_moves_no_position(family: str, session: Session) -> None:
    """A row finds what another one computed behind more padding, or behind none."""
    model = make(family)
    batches = texts(5), texts(0, 3, 9), texts(2, 0, seed=2), texts(26, 0, seed=3)
    expected = [generate(model, "sdpa", **each) for each in batches]
    found = []
    with offload(model, CXL, prefixes=kept(), session=session) as done:
        for batch, tokens in zip(batches, expected, strict=True):
            before = counts_of(done).found_tokens
            assert torch.equal(generate(model, **batch), tokens)
            found.append(counts_of(done).found_tokens - before)
    # The first prompt leaves five blocks. All rows of a batch share what the row with the least
    # has: 20 tokens of the row that is not padded, and as many columns of the others.
    assert found[:2] == [0, 20 + 17 + 11]
    # 24 tokens of each row are there; behind two columns of padding one needs 26.
    assert found[2] == 24 + 22
    # Of a row of four tokens one has to be computed, so nothing is read.
    assert found[3] == 24


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_return_sequences": 2, "do_sample": True, "temperature": 0.8},
        {"return_dict_in_generate": False, "output_scores": True},
    ],
    ids=["beams", "sampling", "scores"],
)
def test_ways_of_generation_give_the_same_tokens(options: dict[str, Any], session: Session) -> None:
    model = make("gemma3")

    def drawn(**given: Any) -> torch.Tensor:
        torch.manual_seed(7)
        return generate(model, **given, **options)

    both = texts(0, 6), texts(0, 6, seed=2)
    expected = [drawn(**each) for each in both]
    with offload(model, CXL, prefixes=kept(), session=session) as done:
        assert [torch.equal(drawn(**a), b) for a, b in zip(both, expected, strict=True)] == [
            True,
            True,
        ]
        assert counts_of(done).found_tokens > 0


def test_rows_in_parts_give_the_same_tokens(session: Session) -> None:
    model = make("llama")
    both = texts(0, 6, 2), texts(0, 6, 2, seed=2)
    expected = [generate(model, "sdpa", **each) for each in both]
    with offload(model, CXL, prefixes=kept(), rows_at_once=2, session=session) as done:
        assert all(
            torch.equal(generate(model, **a), b) for a, b in zip(both, expected, strict=True)
        )
        assert counts_of(done).found_tokens == 24 + 18 + 22


@pytest.mark.slow(reason="compiles")
def test_compiled_layers_give_the_same_tokens(session: Session) -> None:
    model = make("llama")
    few: dict[str, Any] = {"max_new_tokens": 3}
    both = texts(0), texts(0, seed=2)
    expected = [generate(model, "sdpa", **each, **few) for each in both]
    with offload(model, CXL, prefixes=kept(), session=session) as done:
        model.model.layers[0].compile(backend="eager", dynamic=True)
        for batch, tokens in zip(both, expected, strict=True):
            assert torch.equal(generate(model, **batch, **few), tokens)
        assert counts_of(done).found_tokens == 24


def test_prompts_that_no_store_serves_are_computed_and_say_why(session: Session) -> None:
    model, assistant = make("llama"), make("llama")
    text = texts(0)
    holes = {**text, "attention_mask": text["attention_mask"].clone()}
    holes["attention_mask"][0, 10] = 0
    alone = generate(model, "sdpa", **text)
    expected = generate(model, "sdpa", **holes)
    with offload(model, CXL, prefixes=kept(), session=session) as done:
        assert torch.equal(generate(model, **text), alone)
        assert torch.equal(generate(model, **text, assistant_model=assistant), alone)
        assert torch.equal(generate(model, **holes), expected)
        assert torch.equal(generate(model, **text, prefill_chunk_size=7), alone)
        with torch.no_grad():
            cache = model(text["input_ids"][:, :10]).past_key_values
        assert torch.equal(generate(model, **text, past_key_values=cache), alone)
        del cache
        with torch.autocast("cpu", dtype=torch.bfloat16):
            generate(model, **text)
        made: Any = generate(model, **text, output_hidden_states=True, return_dict_in_generate=True)
        assert made.hidden_states[0][0].shape[1] == 30
        del made
        counts = counts_of(done)
    assert counts.found_tokens == 0
    assert sorted(counts.computed) == [
        "a cache that holds something already, or none",
        "attentions or hidden states of the whole prompt are asked for",
        "autocast",
        "prefill_chunk_size",
        "tokens that are hidden inside of a prompt",
    ]


def test_cache_is_given_back_at_once(session: Session) -> None:
    """Without the garbage collector, which would come by later."""
    model = make("llama")
    with offload(model, CXL, prefixes=kept(), session=session):
        gc.collect()
        gc.disable()
        try:
            for found in (0, 28):
                tokens = generate(model, **texts(0, 4))
                assert session.stats().asked_bytes.current == 0, f"{found} tokens were found"
                del tokens
        finally:
            gc.enable()


def test_block_that_begins_in_inference_mode_keeps_what_comes_after_it(session: Session) -> None:
    model = make("llama")
    done = offload(model, CXL, prefixes=kept(), session=session)
    with torch.inference_mode():
        done.__enter__()
        generate(model, **texts(0))
    expected = generate(model, **texts(0))
    assert torch.equal(generate(model, **texts(0, seed=2)), generate(model, **texts(0, seed=2)))
    assert counts_of(done).found_tokens == 28 + 24 + 28
    done.__exit__(None, None, None)
    assert torch.equal(generate(model, "sdpa", **texts(0)), expected)


def test_prompt_that_fails_midway_keeps_nothing_and_costs_no_slot(session: Session) -> None:
    model = make("llama")
    expected = generate(model, "sdpa", **texts(0))
    with offload(model, CXL, prefixes=kept(), session=session) as done:
        hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                generate(model, **texts(0))
        hook.remove()
        blocks = done._reuse.blocks  # type: ignore[union-attr]
        assert len(blocks) == 0
        assert blocks._books.slots_left == blocks._books.store.layout.slots  # type: ignore[union-attr]
        assert torch.equal(generate(model, **texts(0)), expected)
        assert len(blocks) == 7
