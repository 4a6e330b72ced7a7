"""KV caches that are used next near, those of conversations that wait far."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers.cache_utils import Cache

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.cache import kept_tensors
from cxl_offload.memory import Session
from cxl_offload.tune import NextUse, near_and_far, tier_ratios
from cxl_offload.tune.options import check_bytes


class NearCaches:
    """Follows which cache every forward pass uses, and moves caches between passes.

    All sequences of a cache are used together, so a cache moves as a whole.

    Parameters
    ----------
    session
        The session that caches are in.
    near_bytes
        Room on the near tier for keys and values.
    budget_bytes
        Bytes that may move after a forward pass, in the mean; 0 only advises.

    Attributes
    ----------
    uses
        What is decided, and what has moved.

    Raises
    ------
    ConfigError
        One tier only, or unknown bandwidths.
    """

    def __init__(self, session: Session, *, near_bytes: int, budget_bytes: int) -> None:
        near, far = near_and_far(session.machine)
        self._session = session
        self.uses = NextUse(
            near=near,
            far=far,
            ratios=tier_ratios(session.machine, near, far),
            room_bytes=near_bytes,
            session=session,
            budget_bytes_per_step=budget_bytes,
            framework="transformers",
        )
        self._names: WeakKeyDictionary[Cache, int] = WeakKeyDictionary()
        # Addresses only: whoever holds an allocation keeps a cache twice while it grows.
        self._pieces: dict[int, tuple[int, ...]] = {}
        self._numbers = itertools.count()

    def expect(self, caches: Sequence[Cache]) -> None:
        """Say which caches are used next, in that order; the first comes near before its turn."""
        self.uses.expect([self._name(cache) for cache in caches])

    def granted(self) -> tuple[Cache, ...]:
        """The caches that are near now, asked from their pages."""
        near = self.uses.granted(self._sequences())
        return tuple(cache for cache, name in self._names.items() if name in near)

    @contextlib.contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Follows and moves inside of the block."""
        hook = model.register_forward_hook(self._after_forward, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
            self._names.clear()

    def _name(self, cache: Cache) -> int:
        if cache not in self._names:
            self._names[cache] = next(self._numbers)
        return self._names[cache]

    def _after_forward(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        cache = kwargs.get("past_key_values")
        cache = getattr(output, "past_key_values", None) if cache is None else cache
        if not isinstance(cache, Cache):
            return
        name = self._name(cache)
        self._pieces[name] = self._allocations(cache)
        if self._pieces[name]:
            self.uses.step(name, self._sequences())

    def _allocations(self, cache: Cache) -> tuple[int, ...]:
        """Where each begins that the cache's layers have, or share."""
        owners = (self._session.find(tensor.data_ptr()) for tensor in kept_tensors(cache))
        return tuple(dict.fromkeys(owner.address for owner in owners if owner is not None))

    def _sequences(self) -> dict[Hashable, tuple[int, ...]]:
        """Of the caches that are alive."""
        alive = self._names.values()
        self._pieces = {name: self._pieces.get(name, ()) for name in alive}
        return {name: pieces for name, pieces in self._pieces.items() if pieces}


def check_room(near_bytes: int, kinds: Collection[str]) -> None:
    """Raises ConfigError where ``near_kv_bytes`` is no size or the cache is not in tiers."""
    check_bytes(near_bytes, "near_kv_bytes")
    if near_bytes and "kv" not in kinds:
        raise ConfigError(
            "near_kv_bytes needs the cache in tiers; give a policy of kv, as bind:cxl"
        )
