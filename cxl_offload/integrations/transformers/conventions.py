"""Which models can be offloaded: those that follow transformers' conventions; why not others."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.attention import (
    OWN_ATTENTIONS,
    eager_attention_of,
    registered_name,
)
from cxl_offload.integrations.transformers.cache import layers_without_tiers


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the decoder, which is a part of it in models that also see or hear."""
    return model.config.get_text_config(decoder=True)


def kv_shape(config: Any) -> tuple[int, int]:
    """Heads of keys and values of a layer, and the width of each, as the configuration says."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(heads), int(dim)


def own_attention(model: PreTrainedModel) -> str:
    """What the model computes prompts with: eager, sdpa, or eager where sdpa drops a soft cap.

    Raises
    ------
    ConfigError
        It computes with another.
    """
    config = text_config(model)
    own = config._attn_implementation
    if own in map(registered_name, OWN_ATTENTIONS):
        raise ConfigError(f"{type(model).__name__} is offloaded already; end that block first")
    if own not in OWN_ATTENTIONS:
        raise ConfigError(
            f"{type(model).__name__} computes attention with {own}; load it with "
            f"attn_implementation={' or '.join(map(repr, OWN_ATTENTIONS))}"
        )
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return "eager" if capped else str(own)


def base_model(model: Any) -> Any:
    """The model that PEFT wraps, with the adapters in its layers; any other as it is."""
    wrapped = type(model).__module__.partition(".")[0] == "peft"
    return model.get_base_model() if wrapped and hasattr(model, "get_base_model") else model


def check_conventions(model: PreTrainedModel) -> None:
    """Refuse a model whose attention or cache is not transformers' common one.

    Raises
    ------
    ConfigError
        One line with what is missing.
    """
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(f"{type(model).__name__} is no model of transformers (PreTrainedModel)")
    name = type(model).__name__
    config = text_config(model)
    if config.is_encoder_decoder:
        raise ConfigError(f"{name} has an encoder; only decoders have their KV cache in tiers")
    if not hasattr(model, "generate"):
        raise ConfigError(
            f"{name} does not generate; give the model with its head (...ForCausalLM)"
        )
    if not _takes_attention(model):
        raise ConfigError(
            f"{name} computes its attention itself: it does not ask transformers' "
            "AttentionInterface for one, so its KV cannot be in tiers; load() places its weights"
        )
    if not model._supports_default_dynamic_cache():
        raise ConfigError(f"{name} has a cache of its own; transformers' DynamicCache does not fit")
    odd = layers_without_tiers(DynamicCache(config=config))
    if odd:
        raise ConfigError(f"{name} keeps {', '.join(sorted(odd))}, which cannot lie in tiers")
    if own_attention(model) == "eager" and eager_attention_of(model) is None:
        raise ConfigError(f"{name}: no eager_attention_forward in {type(model).__module__}")


def _takes_attention(model: PreTrainedModel) -> bool:
    ask = getattr(model, "_can_set_attn_implementation", None)
    can_set = bool(ask()) if ask is not None else False
    return can_set and bool(getattr(model, "_supports_attention_backend", True))


def takes_room(model: PreTrainedModel) -> bool:
    """Whether generate() says how many positions a cache will have, by the method we know."""
    prepare = getattr(type(model), "_prepare_cache_for_generation", None)
    if prepare is None:
        return False
    return list(inspect.signature(prepare).parameters) == [
        "self",
        "generation_config",
        "model_kwargs",
        "generation_mode",
        "batch_size",
        "max_cache_length",
    ]
