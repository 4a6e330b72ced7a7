"""Models whose weights bitsandbytes keeps in 8 and in 4 bits, on a CPU: codes and scales in tiers.

The tokens are compared with those of the same model without tiers, by bitsandbytes' own layers.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import load, offload
from cxl_offload.memory import Session

from .conftest import machine
from .ecosystem import needed
from .models import PAD, VOCAB, generate

POLICIES = {"kv": "bind:2", "weights": "bind:1"}
KINDS: dict[str, dict[str, Any]] = {
    "8 bits": {"load_in_8bit": True},
    "4 bits": {"load_in_4bit": True},
    "4 bits, scales in 8": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.bfloat16,
    },
}


@pytest.fixture(autouse=True)
def bitsandbytes() -> None:
    needed("bitsandbytes")


def make(width: int = 128, inner: int = 256) -> PreTrainedModel:
    """A LLaMA whose rows are whole blocks of 64, as 4 bits on a CPU want them."""
    torch.manual_seed(3)
    shape = {"vocab_size": VOCAB, "hidden_size": width, "intermediate_size": inner}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, pad_token_id=PAD, bos_token_id=0))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model.eval()


@pytest.fixture(params=KINDS)
def quantized(request: pytest.FixtureRequest, tmp_path: Path) -> PreTrainedModel:
    """As transformers makes it of a checkpoint that is not quantized."""
    make().save_pretrained(tmp_path / "whole")
    asked = BitsAndBytesConfig(**KINDS[request.param])
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", quantization_config=asked)
    return found.eval()  # type: ignore[no-any-return]


def held(model: PreTrainedModel) -> list[torch.Tensor]:
    """Codes and scales of one layer, wherever bitsandbytes keeps them at the moment."""
    layer = model.model.layers[0].mlp.down_proj
    if hasattr(layer.weight, "CB"):
        at = layer.weight if layer.weight.CB is not None else layer.state
        return [layer.weight.data, at.CB, at.SCB]
    state = layer.weight.quant_state
    return [
        layer.weight.data,
        state.absmax,
        *([state.state2.absmax] if getattr(state, "state2", None) else []),
    ]


def nodes(model: PreTrainedModel, session: Session) -> set[int]:
    found: set[int] = set()
    for each in held(model):
        found |= set(session.bytes_per_node(each.data_ptr(), each.nbytes))
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("used", ["before", "new"])
def test_model_gives_the_same_tokens_from_its_tier_and_after_it(
    used: str, quantized: PreTrainedModel, session: Session
) -> None:
    expected = generate(copy.deepcopy(quantized))
    assert not torch.equal(expected, generate(make())), "it was quantized"
    if used == "before":
        assert torch.equal(generate(quantized), expected)
    with offload(quantized, POLICIES, session=session) as done:
        assert nodes(quantized, session) == {1}
        assert torch.equal(generate(quantized), expected)
        assert nodes(quantized, session) == {1}, "where generating left it"
        assert done.calls.kernel > 0
        codes = sum(each.nbytes for each in held(quantized))
        counted = sum(use.live_bytes for use in done.store.use().values())
        assert counted > codes
        assert session.stats().nodes[1].current_bytes >= counted
    assert 1 not in nodes(quantized, session)
    assert len({each.data_ptr() for each in held(quantized)[:2]}) == len(held(quantized)[:2]) - (
        hasattr(quantized.model.layers[0].mlp.down_proj.weight, "CB")
    ), "codes are there once"
    assert torch.equal(generate(quantized), expected)


def test_checkpoint_is_loaded_to_its_tier(
    quantized: PreTrainedModel, session: Session, tmp_path: Path
) -> None:
    quantized.save_pretrained(tmp_path / "codes")
    expected = generate(AutoModelForCausalLM.from_pretrained(tmp_path / "codes").eval())
    model = load(tmp_path / "codes", POLICIES, session=session)
    assert nodes(model, session) == {1}
    places = [each.data_ptr() for each in held(model)]
    asked = session.stats().asked_bytes.current
    for _ in range(2):
        with offload(model, POLICIES, session=session):
            assert torch.equal(generate(model), expected)
        assert [each.data_ptr() for each in held(model)] == places
    assert session.stats().asked_bytes.current == asked
    with offload(model, {"kv": "bind:2", "weights": "bind:0"}, session=session):
        assert nodes(model, session) == {0}
        assert torch.equal(generate(model), expected)
    assert torch.equal(generate(model), expected)


def test_cache_alone_may_be_in_a_tier(quantized: PreTrainedModel, session: Session) -> None:
    expected = generate(copy.deepcopy(quantized))
    with offload(quantized, {"kv": "bind:2"}, session=session) as done:
        assert torch.equal(generate(quantized), expected)
        assert not nodes(quantized, session) & {1, 2}
        assert done.calls.kernel > 0


def test_weights_that_do_not_fit_are_back_in_ordinary_memory(quantized: PreTrainedModel) -> None:
    expected = generate(copy.deepcopy(quantized))
    small = Session.simulated(machine(), limits={1: 100_000})
    with (
        pytest.raises(MemoryError, match="node 1"),
        offload(quantized, {"mlp": "bind:1"}, session=small),
    ):
        pytest.fail("the block began")
    assert small.stats().asked_bytes.peak > 0
    assert small.stats().asked_bytes.current == 0
    assert torch.equal(generate(quantized), expected)


def test_model_in_its_tier_is_saved_as_any_other(
    quantized: PreTrainedModel, session: Session, tmp_path: Path
) -> None:
    if not hasattr(quantized.model.layers[0].mlp.down_proj.weight, "CB"):
        pytest.skip("bitsandbytes 0.50 saves other 4-bit codes once a CPU has computed with them")
    expected = generate(copy.deepcopy(quantized))
    with offload(quantized, POLICIES, session=session):
        generate(quantized)
        quantized.save_pretrained(tmp_path / "saved")
        assert torch.equal(generate(quantized), expected)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(generate(saved), expected)


def test_rows_that_are_no_whole_blocks_are_refused_as_bitsandbytes_refuses_them(
    session: Session, tmp_path: Path
) -> None:
    make(128, 96).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=BitsAndBytesConfig(load_in_4bit=True)
    ).eval()
    if not model.model.layers[0].mlp.down_proj.support_avx512bf16_for_cpu:
        pytest.skip("this CPU has no bfloat16 in AVX-512, for which bitsandbytes packs codes")
    with pytest.raises(RuntimeError):
        generate(copy.deepcopy(model))
    with (
        pytest.raises(ConfigError, match="128 x 96 in 4 bits") as caught,
        offload(model, POLICIES, session=session),
    ):
        pytest.fail("the block began")
    assert "\n" not in str(caught.value)
