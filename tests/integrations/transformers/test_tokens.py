"""Tokens under ``offload`` are those of stock transformers, family by family and way by way."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from cxl_offload.integrations.transformers import offload
from cxl_offload.integrations.transformers.growing_layers import TierLayer
from cxl_offload.integrations.transformers.room import SMALL_TYPES, KvMemory
from cxl_offload.integrations.transformers.weights import store_for
from cxl_offload.memory import Bind, Session
from cxl_offload.ops.linear import PreparedLinear
from cxl_offload.ops.measured_linear import MeasuredLinear

from .models import ALIKE, FAMILIES, ONLY_EAGER, PAD, generate, in_double, make, prompts

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "fixed cache": {"cache_implementation": "static"},
}
CXL = {"kv": "bind:2"}


@pytest.mark.sampled(18)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ALIKE)
def test_tokens_are_those_of_stock_attention(family: str, way: str, session: Session) -> None:
    model, options = make(family), WAYS[way]
    by_eager = generate(model, "eager", **options)
    by_sdpa = generate(model, "sdpa", **options)
    assert len(by_eager[:, 20:].unique()) > 12  # the tokens say something
    assert torch.equal(by_eager, by_sdpa)
    with offload(model, CXL, session=session) as done:
        tokens = generate(model, **options)
    assert torch.equal(tokens, by_sdpa)
    assert done.calls.kernel >= 9 * model.config.num_hidden_layers
    assert not done.calls.own


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loaded_with", ["eager", "sdpa"])
def test_soft_caps_are_kept_where_stock_sdpa_drops_them(
    loaded_with: str, way: str, session: Session
) -> None:
    model, options = make("gemma2"), WAYS[way]
    by_eager = generate(model, "eager", **options)
    assert not torch.equal(by_eager, generate(model, "sdpa", **options))
    model.set_attn_implementation(loaded_with)
    with offload(model, CXL, session=session) as done:
        tokens = generate(model, **options)
    assert torch.equal(tokens, by_eager)
    assert done.calls.kernel >= 9 * model.config.num_hidden_layers
    assert not done.calls.own


@pytest.mark.parametrize("way", WAYS)
def test_sinks_take_their_share_of_the_weights(way: str, session: Session) -> None:
    model, options = make("gpt-oss"), WAYS[way]
    by_eager = generate(model, "eager", **options)
    with offload(model, CXL, session=session) as done:
        tokens = generate(model, **options)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks.add_(6)
        drained = generate(model, **options)
    assert torch.equal(tokens, by_eager)
    assert not torch.equal(drained, by_eager)  # the sinks say something
    assert done.calls.kernel >= 9 * model.config.num_hidden_layers
    assert not done.calls.own


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3", "gpt-oss"])
def test_assisted_decoding_gives_the_tokens_of_the_model_alone(
    family: str, session: Session
) -> None:
    """Candidates are taken back: also out of a window that is full."""
    model, assistant = make(family), make(family)
    noise = 0.02 if family == "gpt-oss" else 0.002  # enough for it to be wrong at times
    with torch.no_grad():
        for weight in assistant.parameters():
            weight.add_(noise * torch.randn_like(weight))
    assistant.generation_config.assistant_confidence_threshold = 0  # a tiny model is never sure
    one = {name: rows[2:3] for name, rows in prompts().items()}
    own = "eager" if family in ONLY_EAGER else "sdpa"
    assistant.set_attn_implementation(own)
    alone = generate(model, own, **one)
    stock = generate(model, own, **one, assistant_model=assistant)
    assert torch.equal(stock, alone)
    with (
        offload(model, CXL, session=session) as done,
        offload(assistant, {"kv": "bind:1"}, session=session) as helped,
    ):
        tokens = generate(model, **one, assistant_model=assistant)
        assert session.stats().nodes[1].peak_bytes > 0
    assert torch.equal(tokens, alone)
    assert done.calls.several >= model.config.num_hidden_layers  # several candidates at once
    assert done.calls.prompt == model.config.num_hidden_layers
    assert not done.calls.own
    assert helped.calls.kernel > 0


@pytest.mark.parametrize("family", ["opt", "mistral", "gemma3"])
def test_prefix_computed_once_serves_several_prompts(family: str, session: Session) -> None:
    model = make(family)
    ids = prompts()["input_ids"][2:3]
    follow = torch.tensor([[9, 8, 7], [20, 30, 40]])
    stock = [generate(model, "sdpa", **_after(ids, row)) for row in follow]
    with offload(model, CXL, session=session), torch.no_grad():
        prefix = model(ids).past_key_values
        for row, expected in zip(follow, stock, strict=True):
            kept = copy.deepcopy(prefix)
            assert _on_node(session, kept) == {2}
            tokens = generate(model, **_after(ids, row), past_key_values=kept)
            assert torch.equal(tokens, expected)
        del kept, prefix


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_chat_goes_on_with_the_cache_of_the_turn_before(family: str, session: Session) -> None:
    model = make(family)
    ids = prompts()["input_ids"][2:4]
    more = torch.tensor([[9, 8, 7, 6], [20, 30, 40, 50]])
    with offload(model, CXL, session=session):
        first = generate(model, **_whole(ids), return_dict_in_generate=True)
        turn = torch.cat([first.sequences, more], dim=1)
        tokens = generate(model, **_whole(turn), past_key_values=first.past_key_values)
        del first
    assert torch.equal(tokens, generate(model, "sdpa", **_whole(turn)))


def test_cache_from_before_the_block_goes_on_in_the_tier(session: Session) -> None:
    model = make("gemma3")
    ids = prompts()["input_ids"][2:4]
    stock = generate(model, "sdpa", **_after(ids, torch.tensor([5, 6]).expand(2, -1)))
    with torch.no_grad():
        cache = model(ids, past_key_values=DynamicCache(config=model.config)).past_key_values
    with offload(model, CXL, session=session):
        options = _after(ids, torch.tensor([5, 6]).expand(2, -1))
        tokens = generate(model, **options, past_key_values=cache)
        assert _on_node(session, cache) == {2}
        del cache
    assert torch.equal(tokens, stock)


def test_cache_stays_valid_after_the_block(session: Session) -> None:
    model = make("qwen2")
    ids = prompts()["input_ids"][2:4]
    more = _after(ids, torch.tensor([5, 6]).expand(2, -1))
    stock = generate(model, "sdpa", **more)
    with offload(model, CXL, session=session), torch.no_grad():
        cache = model(ids).past_key_values
    assert torch.equal(generate(model, **more, past_key_values=cache), stock)
    del cache


@pytest.mark.parametrize("family", ["opt", "llama", "qwen2-moe"])
def test_linear_layers_of_few_rows_give_the_same_tokens(
    family: str, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their weights on a node of their own, and biases."""
    model = make(family)
    stock = generate(model, "sdpa")
    layers = [module for module in model.modules() if type(module) is torch.nn.Linear]
    called = Mock(wraps=PreparedLinear.__call__)
    monkeypatch.setattr(PreparedLinear, "__call__", lambda *given: called(*given))
    with offload(model, {**CXL, "weights": "bind:1"}, linear_rows=4, session=session):
        tokens = generate(model)
    assert called.call_count >= 9 * len(layers)
    assert torch.equal(tokens, stock)
    assert not any("forward" in vars(layer) for layer in layers)


@pytest.mark.parametrize("way", ["kernel", "torch"])
def test_fastest_linear_layers_are_those_that_the_first_call_found(
    way: str, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("llama")
    stock = generate(model, "sdpa")
    layers = [module for module in model.modules() if type(module) is torch.nn.Linear]
    shapes = {(layer.out_features, layer.in_features) for layer in layers}
    kernel = Mock(wraps=PreparedLinear.__call__)
    monkeypatch.setattr(PreparedLinear, "__call__", lambda *given: kernel(*given))
    hopeful = Mock(return_value=[way])
    monkeypatch.setattr(MeasuredLinear, "_hopeful", hopeful)
    with offload(model, CXL, linear_rows="fastest", session=session):
        tokens = generate(model)
    assert torch.equal(tokens, stock)
    assert len(shapes) <= hopeful.call_count <= 3 * len(shapes)  # prompt, decoding, the last token
    assert (kernel.call_count >= 8 * len(layers)) == (way == "kernel")
    tried = hopeful.call_count
    with offload(model, CXL, linear_rows="fastest", session=session):
        assert torch.equal(generate(model), stock)
    assert hopeful.call_count == tried, "a second block of the model knows what the first found"
    with offload(model, {**CXL, "weights": "bind:1"}, linear_rows="fastest", session=session):
        generate(model)
    assert hopeful.call_count == 2 * tried, "weights that lie elsewhere may be read another way"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prompts_go_through_the_kernel_where_torch_is_slower(
    dtype: torch.dtype, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("llama", dtype)
    exact = _prompt_logits(in_double(model))
    by_torch = (_prompt_logits(model) - exact).abs().mean()
    kernel = Mock(wraps=PreparedLinear.__call__)
    monkeypatch.setattr(PreparedLinear, "__call__", lambda *given: kernel(*given))
    monkeypatch.setattr(MeasuredLinear, "_fastest_by_parts", lambda *_: "kernel")
    layers = [module for module in model.modules() if type(module) is torch.nn.Linear]
    with offload(model, CXL, linear_rows="fastest", session=session):
        _prompt_logits(model)
        kernel.reset_mock()
        ours = (_prompt_logits(model) - exact).abs().mean()
    assert kernel.call_count == len(layers)
    assert ours <= 1.2 * by_torch


def _prompt_logits(model: PreTrainedModel) -> torch.Tensor:
    """Of 80 rows, more than the kernel takes by itself."""
    with torch.no_grad():
        found: torch.Tensor = model(**prompts()).logits
    return found.double()


@pytest.mark.parametrize("linear_rows", [4, "fastest"])
def test_linear_layers_give_the_type_that_autocast_asks_for(
    linear_rows: Any, session: Session
) -> None:
    """As stock: layers of few rows are of the same type as those of many."""
    model = make("llama").requires_grad_(False)
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(2, layer.in_features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock = layer(x)
        with offload(model, CXL, linear_rows=linear_rows, session=session), torch.no_grad():
            ours = [layer(x) for _ in range(3)]  # the first call of "fastest" times
    assert [found.dtype for found in ours] == [torch.bfloat16] * 3
    assert all(torch.equal(found, stock) for found in ours)


def test_linear_layers_of_few_rows_are_as_near_to_double_as_torch(session: Session) -> None:
    model = make("llama", torch.bfloat16)
    exact = _step_logits(in_double(model))
    by_torch = (_step_logits(model, "sdpa") - exact).abs().mean()
    with offload(model, CXL, linear_rows=4, session=session):
        ours = (_step_logits(model) - exact).abs().mean()
    assert ours <= 1.2 * by_torch


@pytest.mark.parametrize("dtype", SMALL_TYPES)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_small_types_of_states_err_as_much_as_they_round(
    family: str, dtype: torch.dtype, session: Session
) -> None:
    """In half the room; the error is of rounding, far below what the logits say."""
    model = make(family, torch.bfloat16)
    exact = _step_logits(in_double(model))
    with offload(model, CXL, kv_dtype=dtype, session=session) as done:
        ours = (_step_logits(model) - exact).abs().mean()
        held = done.store.use()[("kv", "host")].peak_bytes
        assert done.calls.kernel == 4 * model.config.num_hidden_layers
    with offload(model, CXL, session=session) as done:
        fine = (_step_logits(model) - exact).abs().mean()
        assert held * 2 == done.store.use()[("kv", "host")].peak_bytes
    assert fine < ours < 0.25 * exact.abs().mean()


@pytest.mark.parametrize("way", ["beams", "chat"])
def test_small_types_of_states_serve_beams_and_turns(way: str, session: Session) -> None:
    """Beams reorder them, and several new positions attend to them by the model's own attention."""
    model = make("mistral", torch.bfloat16)
    ids = prompts()["input_ids"][2:4]
    with offload(model, CXL, kv_dtype=torch.float8_e4m3fn, session=session), torch.no_grad():
        if way == "beams":
            assert generate(model, num_beams=3).shape == (4, 30)
        else:
            cache = model(ids).past_key_values
            more = _after(ids, torch.tensor([5, 6]).expand(2, -1))
            assert generate(model, **more, past_key_values=cache).shape == (2, 32)
            assert {layer.keys.dtype for layer in cache.layers} == {torch.float8_e4m3fn}
            del cache


@pytest.mark.parametrize("dtype", SMALL_TYPES)
def test_states_beyond_a_small_type_become_its_largest_number(
    dtype: torch.dtype, session: Session
) -> None:
    """torch's own conversion makes them infinite in float8_e5m2."""
    store = store_for({"kv": Bind((2,))}, session)
    layer = TierLayer(KvMemory(store, dtype))
    most = torch.finfo(dtype).max
    states = torch.tensor([1e9, -1e9, 3.0, 0.0]).expand(1, 1, 2, 4)
    layer.update(states, states)
    assert layer.keys.float()[0, 0, 0].tolist() == [most, -most, 3.0, 0.0]
    del layer


@pytest.mark.parametrize("damage", ["keys", "values", "weights"])
def test_damaged_bytes_change_the_tokens(damage: str, session: Session) -> None:
    """Or the comparisons above would compare nothing."""
    model = make("llama")
    ids = prompts()["input_ids"][2:4]
    more = _after(ids, torch.tensor([5, 6]).expand(2, -1))
    stock = generate(model, "sdpa", **more)
    with offload(model, CXL, session=session), torch.no_grad():
        cache = model(ids).past_key_values
        if damage == "weights":
            model.model.layers[1].mlp.down_proj.weight[:8] *= -1
        else:
            getattr(cache.layers[1], damage)[:, :, 4:12] *= -1
        tokens = generate(model, **more, past_key_values=cache)
        del cache
    assert not torch.equal(tokens, stock)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_as_near_to_double_as_stock(
    family: str, dtype: torch.dtype, session: Session
) -> None:
    """Logits of single steps over the same tokens, against the formula in double precision."""
    model = make(family, dtype)
    exact = _step_logits(in_double(model))
    errors = {
        own: (_step_logits(model, own) - exact).abs().mean().item()
        for own in ("eager", "sdpa")
        if not (family in ONLY_EAGER and own == "sdpa")
    }
    model.set_attn_implementation("eager" if family in ONLY_EAGER else "sdpa")
    with offload(model, CXL, session=session):
        ours = (_step_logits(model) - exact).abs().mean().item()
    # Most of it comes from the linear layers, either way; test_exactness.py has attention alone.
    assert ours <= 1.2 * max(errors.values())


def _after(ids: torch.Tensor, row: torch.Tensor) -> dict[str, torch.Tensor]:
    return _whole(torch.cat([ids, row.reshape(ids.shape[0], -1)], dim=1))


def _whole(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _on_node(session: Session, cache: DynamicCache) -> set[int]:
    """The nodes of all keys and values, asked from their pages."""
    found: set[int] = set()
    for layer in cache.layers:
        for states in (layer.keys, layer.values):
            found |= set(session.placement(states.data_ptr(), states[0, 0].nbytes).granted)
    return found


def _step_logits(model: PreTrainedModel, own: str | None = None) -> torch.Tensor:
    """Of four tokens, one at a time after a prompt; float64 ``(rows, 4, vocab)``."""
    if own is not None:
        model.set_attn_implementation(own)
    given = prompts()
    mask, follow = given["attention_mask"], torch.arange(40, 44)
    logits = []
    with torch.no_grad():
        cache = model(**given, use_cache=True).past_key_values
        for token in follow:
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)
            ids = token.expand(mask.shape[0], 1)
            positions = (mask.sum(dim=1, keepdim=True) - 1) if PAD in given["input_ids"] else None
            made = model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache
            )
            logits.append(made.logits[:, -1].double())
    return torch.stack(logits, dim=1)
