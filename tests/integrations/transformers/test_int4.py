"""KV as 4-bit codes: what a row is worth, the kernel over it, and models that keep it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.cache_utils import DynamicLayer

from cxl_offload.integrations.transformers import offload
from cxl_offload.integrations.transformers.int4_rows import as_cache, decoded, encoded
from cxl_offload.memory import Session
from cxl_offload.ops.attention import decode_attention
from cxl_offload.plan.kv_types import KV_TYPES

from .models import ONLY_EAGER, by_formula, generate, make, prompts

CXL = {"kv": "bind:2"}


def worth(row: bytes, dim: int) -> list[float]:
    """The numbers of one row, read byte by byte: codes of all groups first, then their scales."""
    groups = len(row) // 36
    scales = np.frombuffer(row[groups * 32 :], dtype=np.float16).astype(float)
    codes = [half for byte in row[: groups * 32] for half in (byte >> 4, byte & 15)]
    return [codes[at] * scales[at // 64 * 2 + 1] + scales[at // 64 * 2] for at in range(dim)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
def test_numbers_are_off_by_half_a_step_of_their_group(dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(dim)
    states = torch.randn(2, 3, 5, dim, generator=generator) * torch.logspace(-6, 4, 5)[:, None]
    states = states.to(dtype)
    states[0, 0, 0] = 3.5  # a step of nothing
    rows = encoded(states)
    assert rows.dtype is torch.uint8
    assert rows.shape == (2, 3, 5, KV_TYPES["int4"].row_bytes(dim))
    numbers = decoded(rows, dim, torch.float32)
    for at in np.ndindex(2, 3, 5):
        exact = states[at].double().numpy()
        found = np.array(worth(bytes(rows[at].numpy()), dim))
        np.testing.assert_allclose(numbers[at].numpy(), found, rtol=1e-6, atol=1e-30)
        for first in range(0, dim, 64):
            group = exact[first : first + 64]
            span = group.max() - group.min()
            most = span / 30 + 2e-3 * abs(group).max() + 1.1e-6  # and float16 scales
            assert abs(found[first : first + 64] - group).max() <= most


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dim", [16, 80, 128])
def test_kernel_over_rows_attends_to_what_they_are_worth(dim: int, queries: int) -> None:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(2, 2, 2, 40, dim, generator=generator)
    query = torch.randn(2, 4, queries, dim, generator=generator)
    keys, values = (encoded(each) for each in states)
    made = decode_attention(query, as_cache(keys), as_cache(values), causal=False)
    exact, _ = by_formula(
        torch.nn.Module(),
        query.double(),
        *(decoded(each, dim, torch.float64) for each in (keys, values)),
        torch.ones(2, 1, queries, 40, dtype=torch.bool),
    )
    torch.testing.assert_close(made.double(), exact.transpose(1, 2), rtol=1e-4, atol=1e-5)


class _RoundedLayer(DynamicLayer):  # type: ignore[misc]
    """transformers' own layer, keeping what codes are worth; the first prompt sees itself exact."""

    def update(self, keys: Any, values: Any, *args: Any, **given: Any) -> Any:
        first = self.get_seq_length() == 0
        rounded = [decoded(encoded(each), each.shape[-1], each.dtype) for each in (keys, values)]
        seen = super().update(*rounded, *args, **given)
        return (keys, values) if first else seen


def _rounded(model: PreTrainedModel) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = [_RoundedLayer() for _ in range(model.config.num_hidden_layers)]
    return cache


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi", "mixtral"])
def test_tokens_are_those_of_stock_over_the_same_codes(
    family: str, options: dict[str, Any], session: Session
) -> None:
    model = make(family)
    exact = generate(model, "sdpa", **options)
    rounded = generate(model, "sdpa", **options, past_key_values=_rounded(model))
    assert not torch.equal(rounded, exact)  # codes say less: the comparison says something
    with offload(model, CXL, kv_dtype="int4", session=session) as done:
        tokens = generate(model, **options)
    assert torch.equal(tokens, rounded)
    assert not done.calls.own


@pytest.mark.parametrize("turn", [3, 40])
def test_turn_of_a_chat_attends_to_codes(turn: int, session: Session) -> None:
    """Few tokens by the kernel, many by the model's own attention over a copy."""
    model = make("llama")
    ids = prompts()["input_ids"][2:4]
    more = torch.randint(3, 200, (2, turn), generator=torch.Generator().manual_seed(4))
    whole = torch.cat([ids, more], dim=1)
    given = {"input_ids": whole, "attention_mask": torch.ones_like(whole)}
    with torch.no_grad():
        cache = _rounded(model)
        model(ids, past_key_values=cache)
        stock = generate(model, "sdpa", **given, past_key_values=cache)
        with offload(model, CXL, kv_dtype="int4", session=session):
            kept = model(ids).past_key_values
            tokens = generate(model, **given, past_key_values=kept)
            del kept
    assert torch.equal(tokens, stock)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "gpt-oss"])
def test_windows_of_codes_generate(family: str, session: Session) -> None:
    """Errors are those of codes: far below what the logits say, where both see the same tokens."""
    model = make(family)
    own = "eager" if family in ONLY_EAGER else "sdpa"
    options = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 2}
    exact = generate(model, own, **options).logits[-1]
    with offload(model, CXL, kv_dtype="int4", session=session) as done:
        coded = generate(model, **options).logits[-1]
        assert done.calls.kernel == model.config.num_hidden_layers
    error = (coded - exact).abs().mean() / exact.abs().mean()
    assert 0 < error < 0.6


def test_codes_take_as_much_room_as_they_are(session: Session) -> None:
    """36 bytes for 64 numbers, in memory of the tier; also after beams and copies."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = Qwen3Config(vocab_size=256, num_hidden_layers=2, intermediate_size=96, **shape)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    model.generation_config.pad_token_id = 1
    with offload(model, CXL, kv_dtype="int4", session=session) as done:
        generate(model)
        use = done.store.use()[("kv", "host")]
    assert use.peak_bytes == 2 * 2 * 4 * 2 * (20 + 10 - 1) * 36
    assert use.granted.keys() == {2}
