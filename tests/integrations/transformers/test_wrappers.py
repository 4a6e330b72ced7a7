"""Decoders inside of a model that also sees (``*ForConditionalGeneration``), as Gemma 3 is sold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

from cxl_offload.integrations.transformers import load, offload
from cxl_offload.memory import Session

from .models import PAD, VOCAB, WINDOW, choosing, generate

POLICIES = {"kv": "bind:2", "weights": "bind:1"}
IMAGE = 250
"""The token in whose place a part of a picture is."""

_TEXT = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT |= {"intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 512}
_SIGHT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
_SIGHT |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 4}


def gemma3() -> PreTrainedModel:
    text = Gemma3TextConfig(
        **_TEXT, head_dim=16, query_pre_attn_scalar=16, sliding_window=WINDOW,
        sliding_window_pattern=2, pad_token_id=PAD, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    config = Gemma3Config(
        text_config=text.to_dict(), vision_config=_SIGHT, mm_tokens_per_image=4,
        image_token_index=IMAGE, boi_token_index=251, eoi_token_index=252,
    )  # fmt: skip
    return Gemma3ForConditionalGeneration(config)


def llava() -> PreTrainedModel:
    config = LlavaConfig(
        text_config={**_TEXT, "model_type": "mistral", "sliding_window": WINDOW},
        vision_config={**_SIGHT, "model_type": "siglip_vision_model"},
        image_token_index=IMAGE, image_seq_length=16, vision_feature_select_strategy="full",
    )  # fmt: skip
    return LlavaForConditionalGeneration(config)


WRAPPERS = {"gemma3": gemma3, "llava of mistral": llava}


def make(wrapper: str) -> PreTrainedModel:
    torch.manual_seed(3)
    return choosing(WRAPPERS[wrapper]())


def attentions(model: PreTrainedModel) -> list[str]:
    parts = [model.config, model.config.text_config, model.config.vision_config]
    return [part._attn_implementation for part in parts]


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_text_is_generated_by_the_decoder_inside(
    wrapper: str, options: dict[str, Any], session: Session
) -> None:
    model = make(wrapper)
    stock = generate(model, "eager", **options)
    assert len(stock[:, 20:].unique()) > 12
    assert torch.equal(generate(model, "sdpa", **options), stock)
    before = attentions(model)
    with offload(model, POLICIES, session=session) as done:
        sight = next(iter(model.model.vision_tower.parameters()))
        assert set(session.bytes_per_node(sight.data_ptr(), sight.nbytes)) == {1}
        tokens = generate(model, **options)
        assert set(done.store.use()[("kv", "host")].granted) == {2}
    assert torch.equal(tokens, stock)
    assert done.calls.kernel == 9 * 2
    assert not done.calls.own
    assert attentions(model) == before


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_text_after_a_picture_is_that_of_stock(wrapper: str, session: Session) -> None:
    model = make(wrapper)
    count = 4 if wrapper == "gemma3" else 16
    ids = torch.randint(3, 240, (1, 20), generator=torch.Generator().manual_seed(2))
    ids[0, 2 : 2 + count] = IMAGE
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if wrapper == "gemma3":
        given["token_type_ids"] = (ids == IMAGE).long()
    given["pixel_values"] = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    if wrapper == "gemma3":  # its norm before the text makes little of what a picture says
        with torch.no_grad():
            model.model.multi_modal_projector.mm_input_projection_weight.normal_(0, 4)
    stock = generate(model, "sdpa", **given)
    other = generate(model, **{**given, "pixel_values": -given["pixel_values"]})
    assert not torch.equal(other, stock)  # the picture says something
    with offload(model, POLICIES, session=session) as done:
        tokens = generate(model, **given)
    assert torch.equal(tokens, stock)
    assert done.calls.kernel == 9 * 2


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_checkpoint_of_a_model_that_sees_is_loaded_to_its_place(
    wrapper: str, tmp_path: Path, session: Session
) -> None:
    model = make(wrapper)
    stock = generate(model, "sdpa")
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, POLICIES, session=session)
    assert type(loaded) is type(model)
    for weight in loaded.parameters():
        assert set(session.bytes_per_node(weight.data_ptr(), weight.nbytes)) == {1}
    with offload(loaded, {"kv": "bind:2"}, session=session) as done:
        assert torch.equal(generate(loaded), stock)
    assert done.calls.kernel == 9 * 2
    del loaded, weight
