"""Layers that compute a large batch in parts: the same tokens, in less memory beside the cache."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import offload
from cxl_offload.integrations.transformers.room import KvMemory
from cxl_offload.integrations.transformers.row_parts import take_layers
from cxl_offload.integrations.transformers.weights import store_for
from cxl_offload.memory import Bind, Session

from .models import FAMILIES, ONLY_EAGER, generate, make, prompts

CXL = {"kv": "bind:2"}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "fixed cache": {"cache_implementation": "static"},
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_parts_are_those_of_the_whole_batch(
    family: str, way: str, session: Session
) -> None:
    """Four rows, or twelve beams, three at a time."""
    model, options = make(family), WAYS[way]
    stock = generate(model, "eager" if family in ONLY_EAGER else "sdpa", **options)
    with offload(model, CXL, rows_at_once=3, session=session) as done:
        tokens = generate(model, **options)
    assert torch.equal(tokens, stock)
    parts = 4 if way == "beams" else 2
    assert done.calls.kernel >= 9 * parts * model.config.num_hidden_layers
    assert not done.calls.own


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("turn", [3, 90])
def test_chat_goes_on_in_parts(family: str, turn: int, session: Session) -> None:
    """Also by more tokens than a window has slack for."""
    model = make(family)
    ids = prompts(rows=6)["input_ids"][2:]
    more = torch.randint(3, 200, (4, turn), generator=torch.Generator().manual_seed(4))
    with offload(model, CXL, rows_at_once=3, session=session):
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        first = generate(model, **given, return_dict_in_generate=True)
        whole = torch.cat([first.sequences, more], dim=1)
        given = {"input_ids": whole, "attention_mask": torch.ones_like(whole)}
        tokens = generate(model, **given, past_key_values=first.past_key_values)
        del first
    assert torch.equal(tokens, generate(model, "sdpa", **given))


def test_hidden_states_lie_in_their_tier_and_layers_see_few_rows(session: Session) -> None:
    model, seen = make("llama"), set()
    stock = generate(model, "sdpa")
    hook = model.model.layers[1].mlp.register_forward_hook(
        lambda module, given, out: seen.add(out.shape[0])
    )
    policies = {**CXL, "activations": "bind:1"}
    with offload(model, policies, rows_at_once=3, session=session) as done:
        tokens = generate(model)
    hook.remove()
    assert torch.equal(tokens, stock)
    assert seen == {3, 1}
    use = done.store.use()[("activations", "host")]
    hidden = 4 * 20 * model.config.hidden_size * 4
    assert use.granted.keys() == {1}
    assert hidden <= use.peak_bytes <= 2 * hidden
    assert use.live_bytes == 0


def test_hidden_states_that_are_asked_for_are_those_of_stock(session: Session) -> None:
    model = make("llama")
    options = {"output_hidden_states": True, "return_dict_in_generate": True, "max_new_tokens": 3}
    stock = generate(model, "sdpa", **options).hidden_states
    with offload(model, CXL, rows_at_once=3, session=session):
        ours = generate(model, **options).hidden_states
    for steps in zip(ours, stock, strict=True):
        for one, two in zip(*steps, strict=True):
            torch.testing.assert_close(one, two)


def test_weights_of_attention_that_are_asked_for_are_of_all_rows(session: Session) -> None:
    model = make("llama")
    model.set_attn_implementation("eager")
    options = {"output_attentions": True, "return_dict_in_generate": True, "max_new_tokens": 3}
    stock = generate(model, **options).attentions
    with offload(model, CXL, rows_at_once=3, session=session):
        ours = generate(model, **options).attentions
    for steps in zip(ours, stock, strict=True):
        for one, two in zip(*steps, strict=True):
            torch.testing.assert_close(one, two)


def test_failure_before_the_last_part_leaves_the_cache_as_it_was(session: Session) -> None:
    """So that the step can be taken again."""
    model = make("gemma3")
    ids = prompts()["input_ids"]
    follow = torch.full((4, 1), 9)
    with offload(model, CXL, rows_at_once=3, session=session), torch.no_grad():
        cache = model(ids).past_key_values
        fails = model.model.layers[0].mlp.register_forward_pre_hook(_fail_at_first)
        with pytest.raises(RuntimeError, match="first part"):
            model(follow, past_key_values=cache)
        fails.remove()
        assert cache.get_seq_length() == 20
        again = model(follow, past_key_values=cache).logits
        cache = model(ids).past_key_values
        at_once = model(follow, past_key_values=cache).logits
        del cache
    assert torch.equal(again, at_once)


def _fail_at_first(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
    if given[0].shape[0] == 3:
        raise RuntimeError("first part")


def test_layers_are_as_before_when_the_block_ends(session: Session) -> None:
    model = make("llama")
    with offload(model, CXL, rows_at_once=1, session=session):
        assert all("forward" in vars(layer) for layer in model.model.layers)
    assert not any("forward" in vars(layer) for layer in model.model.layers)


def test_layers_with_states_of_their_own_are_refused(session: Session) -> None:
    """Linear attention updates the state of all rows at every call."""
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 0}
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**shape, **heads)).eval()
    memory = KvMemory(store_for({"kv": Bind((2,))}, session))
    with contextlib.ExitStack() as stack, pytest.raises(ConfigError, match="leave rows_at_once"):
        take_layers(model, 2, memory, stack)


@pytest.mark.parametrize(
    ("policies", "rows", "message"),
    [
        (CXL, 0, "rows_at_once 0"),
        ({"weights": "cxl"}, 2, "give a policy of kv"),
        ({**CXL, "activations": "cxl"}, None, "give rows_at_once"),
    ],
)
def test_parts_that_cannot_be_are_refused(
    policies: dict[str, str], rows: int | None, message: str, session: Session
) -> None:
    with pytest.raises(ConfigError, match=message):
        offload(make("llama"), policies, rows_at_once=rows, session=session)


def test_threads_compute_parts_of_their_own_batches(session: Session) -> None:
    """One stands in the second part of its four rows while the other computes its three."""
    model = make("llama")
    batches = [prompts(rows=4), prompts(rows=3, length=33)]
    expected = [generate(model, "sdpa", **each) for each in batches]
    made: dict[int, torch.Tensor] = {}
    halfway, other_is_done = threading.Event(), threading.Event()

    def wait(_: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        if threading.current_thread().name != "0" or other_is_done.is_set():
            return
        if parts.append(given) or len(parts) == 2:
            halfway.set()
            other_is_done.wait(60)

    def work(at: int) -> None:
        if at:
            halfway.wait(60)
        made[at] = generate(model, **batches[at])
        if at:
            other_is_done.set()

    parts: list[object] = []
    with offload(model, CXL, rows_at_once=2, session=session):
        hook = model.model.layers[0].self_attn.k_proj.register_forward_pre_hook(wait)
        threads = [threading.Thread(target=work, args=(at,), name=str(at)) for at in (0, 1)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        hook.remove()
    assert all(torch.equal(made[at], expected[at]) for at in (0, 1))
