"""Shares of the nodes in every class of tensor of a layout: what a program finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STREAMED, ON_CPU, IDLE, KV = "streamed", "cpu", "idle", "kv"


@dataclass(frozen=True, slots=True)
class Shares:
    """Of every class of tensor on every node; what is not there has none.

    ``resident`` is the share of the layers whose streamed kinds stay on the accelerator, ``kv_gpu``
    that of the keys and values there. ``seconds`` are those of one batch of a block of ``batches``
    batches, a whole number where that was asked for.
    """

    of: Mapping[str, tuple[float, ...]]
    resident: float
    kv_gpu: float
    batches: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Fixed:
    """Shares on the accelerator that are given; None: as much as is best.

    ``resident`` and ``kv_gpu`` are as of :class:`Shares`.
    """

    resident: float | None = None
    kv_gpu: float | None = None
