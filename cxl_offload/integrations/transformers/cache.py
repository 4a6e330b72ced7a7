"""Caches of transformers with layers in tiers in place of their own."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.first_rooms import share_first_rooms
from cxl_offload.integrations.transformers.fixed_layers import (
    TierStaticLayer,
    TierStaticSlidingLayer,
)
from cxl_offload.integrations.transformers.growing_layers import (
    GrowingStates,
    TierLayer,
    TierSlidingLayer,
)
from cxl_offload.integrations.transformers.room import KvMemory


def layers_without_tiers(cache: Cache) -> dict[str, int]:
    """Layers of a cache that hold keys and values and cannot lie in tiers, by class."""
    found: dict[str, int] = {}
    for layer in cache.layers:
        if type(layer) not in _IN_TIERS and not isinstance(layer, GrowingStates):
            name = type(layer).__name__
            found[name] = found.get(name, 0) + 1
    return found


def put_in_tiers(cache: Cache, memory: KvMemory, positions: int = 0) -> None:
    """Give a cache layers in tiers in place of its own; what it holds is copied.

    Parameters
    ----------
    positions
        Room to make ready for when the first states come; 0 lets it grow.

    Raises
    ------
    ConfigError
        The cache is of a kind that cannot lie in tiers.
    MemoryError
        A node has no room for what it holds.
    """
    layers = cache.layers
    if layers and all(isinstance(each, GrowingStates) for each in layers):  # before every token
        return
    odd = layers_without_tiers(cache)
    if odd or getattr(cache, "offloading", False):
        what = ", ".join(sorted(odd)) or "offloading"
        raise ConfigError(
            f"a cache with {what} cannot lie in tiers; give a DynamicCache or a StaticCache, or "
            "leave past_key_values and cache_implementation out"
        )
    if memory.accelerator is not None and any(isinstance(each, StaticLayer) for each in layers):
        raise ConfigError(
            "accelerator_kv is for caches that grow, and this one is fixed; leave it or "
            "cache_implementation out"
        )
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = functools.partial(TierLayer, memory, positions)
    cache.layers[:] = [
        _IN_TIERS[type(layer)](layer, memory, positions) if type(layer) in _IN_TIERS else layer
        for layer in cache.layers
    ]
    _tell_length(cache.layers)
    growing = [layer for layer in cache.layers if isinstance(layer, GrowingStates)]
    share_first_rooms(growing, memory)


def reserve(cache: Cache, positions: int) -> None:
    """Have room for so many positions in the growing layers of a cache that is in tiers."""
    for layer in cache.layers:
        if isinstance(layer, TierLayer | TierSlidingLayer):
            layer.reserve(positions)
    if isinstance(made := cache.layer_class_to_replicate, functools.partial):
        cache.layer_class_to_replicate = functools.partial(made.func, made.args[0], positions)


def kept_tensors(cache: Cache) -> list[torch.Tensor]:
    """The tensors in tiers that hold a cache's keys and values, room for more included."""
    found: list[torch.Tensor] = []
    for layer in cache.layers:
        if isinstance(layer, GrowingStates):
            found += layer.kept_tensors()
    return found


def _growing(layer: DynamicLayer, memory: KvMemory, positions: int) -> TierLayer:
    made = TierLayer(memory, positions)
    if layer.get_seq_length() > 0:
        made.update(layer.keys, layer.values)
    return made


def _sliding(
    layer: DynamicSlidingWindowLayer, memory: KvMemory, positions: int
) -> TierSlidingLayer:
    made = TierSlidingLayer(int(layer.sliding_window), memory, positions)
    made.record_past = layer.record_past
    if layer.is_initialized:
        made.update(layer.keys, layer.values)
        made.cumulative_length = layer.cumulative_length
    return made


def _fixed(layer: StaticLayer, memory: KvMemory, positions: int) -> TierStaticLayer:
    made = TierStaticLayer(layer.max_cache_len, memory)
    if (held := int(layer.get_seq_length())) > 0:
        made.update(layer.keys[:, :, :held], layer.values[:, :, :held])
    return made


def _fixed_sliding(
    layer: StaticSlidingWindowLayer, memory: KvMemory, positions: int
) -> TierStaticSlidingLayer:
    made = TierStaticSlidingLayer(layer.max_cache_len, memory)
    if (seen := layer.cumulative_length_int) > 0:
        held = min(seen, layer.max_cache_len)
        made.update(layer.keys[:, :, :held], layer.values[:, :, :held])
        made.cumulative_length = seen
    return made


def _tell_length(layers: Iterable[Any]) -> None:
    """Windows of a fixed cache, which would go on for ever, end where its other layers end."""
    layers = list(layers)
    lengths = [each.max_cache_len for each in layers if isinstance(each, TierStaticLayer)]
    for each in layers:
        if lengths and isinstance(each, TierStaticSlidingLayer):
            each.most = min(lengths)


def _as_is(layer: Any, memory: KvMemory, positions: int) -> Any:
    """A state that does not grow with the text is no KV."""
    return layer


_IN_TIERS: dict[type, Any] = {
    DynamicLayer: _growing,
    DynamicSlidingWindowLayer: _sliding,
    LinearAttentionLayer: _as_is,
    StaticLayer: _fixed,
    StaticSlidingWindowLayer: _fixed_sliding,
}
