"""Layers of a fixed cache with keys and values in tiers: all positions, or a sliding window.

transformers fixes a cache so that its addresses and shapes can be compiled with; in tiers it is
written and read outside of what is compiled. So what stays of it is its length: memory for all
positions is taken at once, and more than these are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.growing_layers import TierLayer, TierSlidingLayer
from cxl_offload.integrations.transformers.room import KvMemory, slack_of


class TierStaticLayer(TierLayer):
    """A fixed number of positions.

    Parameters
    ----------
    max_cache_len
        How many.
    memory
        Where keys and values are.
    """

    def __init__(self, max_cache_len: int, memory: KvMemory) -> None:
        super().__init__(memory, max_cache_len)
        self.max_cache_len = max_cache_len

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As of a layer that grows.

        Raises
        ------
        ConfigError
            More positions than the cache has room for; nothing is written then.
        """
        if not is_compiling():
            _check_room(self.get_seq_length(), int(key_states.shape[2]), self.max_cache_len)
        return super().update(key_states, value_states, *args, **kwargs)

    def reserve(self, positions: int) -> None:
        """It has its room."""

    def get_max_length(self) -> int:
        """Positions that it has room for."""
        return self.max_cache_len

    def reset(self) -> None:
        """As new, in the same memory."""
        if self._room is not None:
            self._crop(-self._room.positions)


class TierStaticSlidingLayer(TierSlidingLayer):
    """The last positions that a window reaches, of a fixed number.

    Parameters
    ----------
    max_cache_len
        The window; the length of the cache, where that is less.
    memory
        Where keys and values are.

    Attributes
    ----------
    most
        Positions of the layers of the cache that have no window: so many come in all. None: there
        is no such layer.
    """

    def __init__(self, max_cache_len: int, memory: KvMemory) -> None:
        super().__init__(max_cache_len, memory, max_cache_len + slack_of(max_cache_len))
        self.max_cache_len = max_cache_len
        self.most: int | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As of a layer that grows.

        Raises
        ------
        ConfigError
            The layers without a window have no room for so many; nothing is written then.
        """
        if self.most is not None and not is_compiling():
            _check_room(self.get_seq_length(), int(key_states.shape[2]), self.most)
        return super().update(key_states, value_states, *args, **kwargs)

    def reserve(self, positions: int) -> None:
        """Its room is the window's, or that of fewer positions if fewer can come."""
        super().reserve(positions if self.most is None else min(positions, self.most))

    def get_max_length(self) -> int:
        """Positions that the window has."""
        return self.max_cache_len


def _check_room(held: int, count: int, most: int) -> None:
    if held + count > most:
        raise ConfigError(
            f"a fixed cache of {most} positions has {held}, and {count} more do not fit; give a "
            f"StaticCache of max_cache_len={held + count} or more, prompt and all new tokens "
            "together, or a DynamicCache, which grows"
        )
