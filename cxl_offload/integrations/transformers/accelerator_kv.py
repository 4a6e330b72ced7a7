"""A share of the KV cache on the accelerator that a model computes on, and its bytes there."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from cxl_offload.errors import ConfigError
from cxl_offload.objects.kind_store import KindUse
from cxl_offload.objects.placement_rows import PlacementRow
from cxl_offload.units import format_bytes

PART = "accelerator"
"""The part of ``kv`` that lies there, in reports."""


@dataclass(frozen=True, slots=True)
class AcceleratorKv:
    """Where the first positions of every sequence have their keys and values.

    Attributes
    ----------
    device
        Of the memory.
    share
        Of the positions that a layer has room for.
    use
        Bytes that are held, and the most there ever were.
    """

    device: torch.device
    share: float
    use: KindUse = field(default_factory=KindUse)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def positions_of(self, room: int) -> int:
        """Of room for so many positions, how many are on the accelerator."""
        return int(self.share * room)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor, an ordinary one also where the caller infers.

        Raises
        ------
        MemoryError
            The accelerator has no room.
        """
        try:
            with torch.inference_mode(False):
                made = torch.empty(shape, dtype=dtype, device=self.device)
        except torch.OutOfMemoryError as error:
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            raise MemoryError(
                f"accelerator_kv {self.share:g}: {self.device} has no room for "
                f"{format_bytes(nbytes)} of keys or values; give a smaller share"
            ) from error
        with self._lock:
            self.use.add(made.nbytes, {})
        weakref.finalize(made, self._remove, made.nbytes).atexit = False
        return made

    def _remove(self, nbytes: int) -> None:
        with self._lock:
            self.use.remove(nbytes, {})

    def row(self) -> PlacementRow:
        """Of a report; no node has these bytes."""
        policy = f"{self.share:g} on {self.device}"
        return PlacementRow("kv", PART, policy, self.use.peak_bytes, {}, {})


def accelerator_kv(
    share: float, device: torch.device | None, kinds: Collection[str]
) -> AcceleratorKv | None:
    """The accelerator's share as asked; None: there is none.

    Parameters
    ----------
    device
        What the model computes on; None: the CPU.
    kinds
        Those that have a policy.

    Raises
    ------
    ConfigError
        No number from 0 to 1, no accelerator, or a cache that is in no tier.
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ConfigError(
            f"accelerator_kv {share}: a share of the KV cache, from 0 (all in its tier) to 1"
        )
    if not share:
        return None
    if device is None:
        raise ConfigError(
            f"accelerator_kv {share:g}: no accelerator computes; name one with accelerator, or "
            "leave it out"
        )
    if "kv" not in kinds:
        raise ConfigError(
            f"accelerator_kv {share:g} is a share of a cache in a tier; give a policy of kv for "
            "the rest"
        )
    return AcceleratorKv(device, float(share))
