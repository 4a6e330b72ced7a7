"""DeepSpeed's accelerator with host memory from tiers, put in place by its own ``set_accelerator``.

DeepSpeed asks its accelerator for every pinned buffer. The subclass made here answers from the
store of the scope that is open, or of the engine that asks; all else goes on to the accelerator
that was there.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from deepspeed.accelerator import get_accelerator, set_accelerator

from cxl_offload.integrations.deepspeed.objects import MIXED_SITE, SITES
from cxl_offload.integrations.deepspeed.store import Store
from cxl_offload.tensor import copy_whole

_ATTRIBUTE = "cxl_offload_capture"


@dataclass(frozen=True, slots=True)
class _Caller:
    """Which code asked: module and function, and the object if it is a method."""

    site: tuple[str, str]
    owner: Any

    @classmethod
    def of(cls, frame: FrameType) -> _Caller:
        module = str(frame.f_globals.get("__name__", ""))
        return cls((module, frame.f_code.co_name), frame.f_locals.get("self"))


def _kind(site: tuple[str, str], dtype: torch.dtype) -> str:
    if site == MIXED_SITE:
        return "fp32_master" if dtype is torch.float32 else "staging"
    return SITES.get(site, "other")


class Capture:
    """Decides for each request which store serves it, if any.

    Attributes
    ----------
    scopes
        Makers of the stores of open scopes, the innermost last: made at the first request, when
        DeepSpeed has chosen this process's GPU.
    owners
        ZeRO optimizers and their stores, for what they allocate after the scope.
    on_destroy
        What returns the memory of a ZeRO optimizer.
    passed_bytes
        Bytes of no known kind, which are not placed, by the module and function that asked.
    """

    def __init__(self) -> None:
        self.scopes: list[Callable[[], Store]] = []
        self._stores: list[Store] = []
        self.owners: WeakKeyDictionary[Any, Store] = WeakKeyDictionary()
        self.on_destroy: WeakKeyDictionary[Any, Callable[[], None]] = WeakKeyDictionary()
        self.passed_bytes: Counter[str] = Counter()

    def follows(self, engine: Any) -> bool:
        """Whether an engine is placed by somebody already."""
        zero = engine.optimizer
        return zero is not None and any(owner is zero for owner in self.owners)

    def take(
        self, frame: FrameType, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Memory for the request of the calling function; None: it is not for a store."""
        caller = _Caller.of(frame)
        lengths = tuple(int(length) for length in shape)
        if 0 in lengths:
            return None
        store, kind = self._store_of(caller.owner), _kind(caller.site, dtype)
        name = ".".join(caller.site)
        if store is None:
            if kind == "other":  # the other kinds belong to engines that are not placed
                self.passed_bytes[name] += torch.Size(lengths).numel() * dtype.itemsize
            return None
        return store.take(kind, lengths, dtype, pinned=True, site=name)

    def _store_of(self, owner: Any) -> Store | None:
        try:
            own = self.owners.get(owner)
        except TypeError:  # None, or what cannot be referenced weakly
            own = None
        if own is not None:
            return own
        return self.scopes[-1]() if self.scopes else None

    def know(self, store: Store) -> None:
        """Keeps a store known as long as any of its tensors lives."""
        self._stores = [*(each for each in self._stores if each.in_use()), store]

    def is_pinned(self, value: torch.Tensor) -> bool:
        return any(store.owns(value) and store.is_pinned(value) for store in self._stores)

    def unpin(self, frame: FrameType, value: torch.Tensor) -> bool:
        """Drops memory of a store that its owner has no more use for; False: not of a store."""
        caller = _Caller.of(frame)
        if caller.site[1] == "_unpin_offload_buffers" and caller.owner in self.on_destroy:
            self.on_destroy.pop(caller.owner)()
            return not value.numel()
        if any(store.owns(value) for store in self._stores):
            value.data = torch.empty(0, dtype=value.dtype)
            return True
        return False


def installed() -> Capture:
    """The capture of the current accelerator, which is replaced by a tiered one at the first call.

    It stays for the life of the process, because DeepSpeed keeps references to it and allocates
    gradient accumulators in the first backward pass.
    """
    current = get_accelerator()
    found = getattr(current, _ATTRIBUTE, None)
    if isinstance(found, Capture):
        return found
    capture = Capture()
    set_accelerator(_tiered(current, capture))
    return capture


# Long: one class, whose base is known late.
def _tiered(accelerator: Any, capture: Capture) -> Any:
    base: Any = type(accelerator)

    class TieredAccelerator(base):  # type: ignore[misc]
        """The accelerator that was there, with pinned memory from stores."""

        def __init__(self) -> None:
            self.__dict__.update(accelerator.__dict__)
            setattr(self, _ATTRIBUTE, capture)

        def pin_memory(
            self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True
        ) -> torch.Tensor:
            placed = None
            if tensor.device.type == "cpu":
                shape = tensor.shape if match_shape or make_copy else (tensor.numel(),)
                placed = capture.take(sys._getframe(1), shape, tensor.dtype)
            if placed is None:
                pinned: torch.Tensor = super().pin_memory(
                    tensor, make_copy=make_copy, match_shape=match_shape
                )
                return pinned
            return copy_whole(placed, tensor.detach()) if make_copy else placed

        def pin_empty(self, *size: Any, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
            one = len(size) == 1 and not isinstance(size[0], int)
            placed = None
            if torch.device(device).type == "cpu":
                placed = capture.take(sys._getframe(1), size[0] if one else size, dtype)
            if placed is None:
                placed = super().pin_empty(*size, dtype=dtype, device=device)
            return placed

        def pin_empty_like(
            self, tensor: torch.Tensor, device: str = "cpu", dtype: torch.dtype | None = None
        ) -> torch.Tensor:
            placed = None
            if torch.device(device).type == "cpu":
                placed = capture.take(sys._getframe(1), tensor.shape, dtype or tensor.dtype)
            if placed is None:
                placed = super().pin_empty_like(tensor, device=device, dtype=dtype)
            return placed

        def is_pinned(self, tensor: torch.Tensor) -> bool:
            return capture.is_pinned(tensor) or bool(super().is_pinned(tensor))

        def unpin_memory(self, tensor: torch.Tensor) -> Any:
            if capture.unpin(sys._getframe(1), tensor):
                return None
            return super().unpin_memory(tensor)

    return TieredAccelerator()
