"""Layers of a fixed cache with keys and values in tiers: all positions, or a sliding window."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.beam_rows import gather_rows
from cxl_offload.integrations.transformers.growing_layers import refuse_gradients
from cxl_offload.integrations.transformers.room import KvMemory
from cxl_offload.tensor import copy_whole


class FixedStates:
    """What both fixed layers change: where their memory comes from, and how beams reorder it."""

    keys: Any
    values: Any

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Room for all positions, zeros as transformers has them."""
        refuse_gradients(key_states)
        if self._memory.dtype is not None:
            raise ConfigError(
                "a fixed cache keeps keys and values in their own type; leave kv_dtype or "
                "cache_implementation out"
            )
        if key_states.device.type != "cpu":
            raise ConfigError(
                "a fixed cache of a model on an accelerator cannot lie in a tier; leave "
                "cache_implementation out"
            )
        # A fixed layer of one position is what transformers would make, at the size of our choice.
        most, self.max_cache_len = self.max_cache_len, 1
        super().lazy_initialization(key_states, value_states)  # type: ignore[misc]
        self.max_cache_len = most
        part = self._memory.current.part
        batch = key_states.shape[0] if part is None else part.total
        self.keys = self._zeros(key_states, batch)
        self.values = self._zeros(value_states, batch)

    max_cache_len: int
    is_initialized: bool
    _memory: KvMemory

    def _zeros(self, states: torch.Tensor, batch: int) -> torch.Tensor:
        _, heads, _, dim = states.shape
        return self._memory.empty((batch, heads, self.max_cache_len, dim), states.dtype).zero_()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As transformers does it; of some rows where a batch is computed in parts."""
        part = self._memory.current.part
        if part is None:
            made = super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
            return made  # type: ignore[no-any-return]
        if self.keys is None:
            self.lazy_initialization(key_states, value_states)
        whole, length = (self.keys, self.values), self.cumulative_length.clone()
        positions = getattr(self, "cumulative_length_int", 0)
        self.keys, self.values = (each[part.rows] for each in whole)
        try:
            seen = super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.keys, self.values = whole
            if not part.is_last:
                self.cumulative_length.copy_(length)
                self.cumulative_length_int = positions
        return seen  # type: ignore[no-any-return]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Beam search goes on with these sequences."""
        if self.keys is not None:
            gather_rows(self.keys, beam_idx.to("cpu"))
            gather_rows(self.values, beam_idx.to("cpu"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy in the same tiers."""
        made = copy.copy(self)
        memo[id(self)] = made
        if self.keys is not None:
            made.keys, made.values = (
                copy_whole(self._memory.empty(tuple(each.shape), each.dtype), each)
                for each in (self.keys, self.values)
            )
        made.cumulative_length = copy.deepcopy(self.cumulative_length, memo)
        return made

    cumulative_length: Any
    cumulative_length_int: int


class TierStaticLayer(FixedStates, StaticLayer):  # type: ignore[misc]
    """A fixed number of positions."""

    def __init__(self, max_cache_len: int, memory: KvMemory) -> None:
        StaticLayer.__init__(self, max_cache_len)
        self._memory = memory


class TierStaticSlidingLayer(FixedStates, StaticSlidingWindowLayer):  # type: ignore[misc]
    """A fixed number of positions, the last that a window reaches."""

    def __init__(self, max_cache_len: int, memory: KvMemory) -> None:
        StaticSlidingWindowLayer.__init__(self, max_cache_len, max_cache_len)
        self._memory = memory
