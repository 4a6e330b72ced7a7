"""Attention over the cache where it lies: as exact as FlexGen's own, and nothing is copied."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flexgen.pytorch_backend import DeviceType, TorchDevice, TorchTensor

from cxl_offload.integrations.flexgen.attention import CacheInPlace, attend_in_place

HEADS, WIDTH = 3, 24


def _device(kind: DeviceType) -> TorchDevice:
    device = TorchDevice("cpu")
    device.device_type = kind
    return device


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """In double precision, from ``(rows * heads, positions, width)``."""
    scores = torch.einsum("hd,hpd->hp", q[:, 0].double(), k.double())
    scores.masked_fill_(~mask.repeat_interleave(HEADS, dim=0), -torch.inf)
    return torch.einsum("hp,hpd->hd", scores.softmax(dim=1), v.double())


@pytest.mark.parametrize(
    "pieces", [(4,), (1, 3), (2, 1, 1)], ids=["one piece", "two pieces", "three pieces"]
)
@pytest.mark.parametrize("first", [DeviceType.CPU, DeviceType.CUDA])
@pytest.mark.parametrize("positions", [1, 2, 37, 300])
def test_in_place_is_at_least_as_close_to_double_precision_as_flexgen(
    pieces: tuple[int, ...], first: DeviceType, positions: int
) -> None:
    random = torch.Generator().manual_seed(positions)
    rows = sum(pieces)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).half()

    q, new_k, new_v = make(rows * HEADS, 1, WIDTH), *(make(1, rows * HEADS, WIDTH) for _ in "kv")
    caches = [make(positions + 3, rows * HEADS, WIDTH) for _ in "kv"]
    mask = torch.rand(rows, positions, generator=random) > 0.3
    mask[:, -1] = True
    devices = [_device(first), *(_device(DeviceType.CPU) for _ in pieces[1:])]
    stock = TorchDevice("cpu")

    def split(cache: torch.Tensor) -> CacheInPlace:
        parts = cache.split([rows * HEADS for rows in pieces], dim=1)
        both = zip(parts, devices, strict=True)
        return CacheInPlace(tuple(TorchTensor.create_from_torch(p.clone(), d) for p, d in both))

    k, v = split(caches[0]), split(caches[1])
    found = attend_in_place(
        q,
        (k, v),
        (new_k, new_v),
        mask,
        heads=HEADS,
        on_accelerator=lambda q, k, v, *rest: stock._attention_value(
            q.float(), k.float(), v.float(), *rest
        ),
    )

    for cache, new in zip(caches, (new_k, new_v), strict=True):
        cache[positions - 1] = new[0]
    keys, entries = (cache[:positions].transpose(0, 1) for cache in caches)
    exact = _exact(q, keys, entries, mask)
    theirs = stock._attention_value(
        q.float(),
        keys.transpose(1, 2).float(),
        entries.float(),
        mask,
        rows,
        positions,
        1,
        HEADS,
        WIDTH,
    ).half()
    assert found.shape == (rows, HEADS, 1, WIDTH)
    assert found.dtype == torch.float16
    ours = (found.view(-1, WIDTH).double() - exact).abs()
    stock_error = (theirs.view(-1, WIDTH).double() - exact).abs()
    assert ours.mean() <= stock_error.mean() * 1.001
    assert ours.max() <= max(float(stock_error.max()), float(np.finfo(np.float16).eps))
    for cache, expected in ((k, caches[0]), (v, caches[1])):
        joined = torch.cat([piece.data for piece in cache.pieces], dim=1)
        torch.testing.assert_close(joined, expected, rtol=0, atol=0)
