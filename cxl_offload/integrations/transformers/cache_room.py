"""How long a cache will be, before its first token: its memory is asked for once."""

from __future__ import annotations

import contextlib
import logging
import types
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from cxl_offload.integrations.transformers.cache import put_in_tiers, reserve
from cxl_offload.integrations.transformers.conventions import takes_room
from cxl_offload.integrations.transformers.room import KvMemory

_PREPARE = "_prepare_cache_for_generation"
_log = logging.getLogger(__name__)


def tell_room(model: PreTrainedModel, kv: KvMemory, stack: contextlib.ExitStack) -> None:
    """Tell caches how many positions they will have; generate() has no hook that says so.

    Parameters
    ----------
    model
        Whose ``generate()`` is patched until ``stack`` closes.
    kv
        Where keys and values go.
    """
    if not takes_room(model):
        _log.warning(
            "%s does not say how long its cache will be; it grows, and may hold an eighth more",
            type(model).__name__,
        )
        return
    stock = getattr(type(model), _PREPARE)

    def prepare(
        model: PreTrainedModel,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        made = stock(
            model,
            generation_config,
            model_kwargs,
            generation_mode,
            batch_size,
            max_cache_length,
        )
        cache = model_kwargs.get("past_key_values")
        if isinstance(cache, Cache):
            put_in_tiers(cache, kv, max_cache_length)
            reserve(cache, max_cache_length)
        return made

    setattr(model, _PREPARE, types.MethodType(prepare, model))
    stack.callback(delattr, model, _PREPARE)
