"""The hook of a model that puts its cache in tiers before it computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache

from cxl_offload.integrations.transformers.cache import put_in_tiers
from cxl_offload.integrations.transformers.conventions import text_config
from cxl_offload.integrations.transformers.room import KvMemory


def cache_giver(kv: KvMemory) -> Callable[..., Any]:
    """What puts a model's cache in tiers before it computes, also when generate() did not make it.

    It knows no model, so that a copy of the model made in the block has its own.
    """

    def give_cache(
        model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        cache = kwargs.get("past_key_values")
        if isinstance(cache, Cache):  # as generate() gives it, at every token
            put_in_tiers(cache, kv)
            return None
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        cache, config = given.get("past_key_values"), text_config(model)
        if isinstance(cache, Cache):
            put_in_tiers(cache, kv)
            return None
        use_cache = given.get("use_cache")
        wanted = config.use_cache if use_cache is None else use_cache
        if cache is not None or not wanted or model.training or torch.is_grad_enabled():
            return None
        made = DynamicCache(config=config)
        put_in_tiers(made, kv)
        return args, {**kwargs, "past_key_values": made}

    return give_cache
