"""Attention over the cache where it lies: as exact as FlexGen's own, and nothing is copied."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flexgen.pytorch_backend import DeviceType, TorchDevice, TorchTensor

from cxl_offload.integrations.flexgen.attention import CacheInPlace, attend_in_place
from cxl_offload.integrations.flexgen.sizes import COMPRESS_KV

# FlexGen unpads narrow heads with a list of slices; real heads are a multiple of 64 wide.
pytestmark = pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")

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


@pytest.mark.parametrize("width", [24, 64, 80])
@pytest.mark.parametrize("positions", [1, 2, 37, 300])
def test_compressed_cache_in_place_is_at_least_as_close_to_double_precision_as_flexgen(
    width: int, positions: int
) -> None:
    """Both over the codes that FlexGen's own compression made, which stay as they are."""
    random = torch.Generator().manual_seed(positions + width)
    rows = 4

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).half()

    stock = TorchDevice("cpu")
    q, new_k, new_v = make(rows * HEADS, 1, width), *(make(1, rows * HEADS, width) for _ in "kv")
    homes = [_compressed(stock, make(positions + 3, rows * HEADS, width)) for _ in "kv"]
    stock.compressed_device.data_decompress_workspace = [
        torch.empty(positions + 3, rows * HEADS, -(-width // 64), 64) for _ in "kv"
    ]
    before = [part.data.clone() for home in homes for part in home.data[:2]]
    mask = torch.rand(rows, positions, generator=random) > 0.3
    mask[:, -1] = True

    found = attend_in_place(
        q,
        (CacheInPlace((homes[0],)), CacheInPlace((homes[1],))),
        (new_k, new_v),
        mask,
        heads=HEADS,
        on_accelerator=stock._attention_value,
    )

    parts = []
    for home, new in zip(homes, (new_k, new_v), strict=True):
        whole = stock.compressed_device.decompress(home)[:positions].clone()
        whole[positions - 1] = new[0]
        parts.append(whole.transpose(0, 1))
    sizes = (rows, positions, 1, HEADS, width)
    keys = parts[0].transpose(1, 2)
    theirs = stock._attention_value(q.float(), keys, parts[1], mask, *sizes).half()
    exact = _exact(
        q,
        *(
            _exact_codes(home, positions, new)
            for home, new in zip(homes, (new_k, new_v), strict=True)
        ),
        mask,
    )
    assert found.shape == (rows, HEADS, 1, width)
    assert found.dtype == torch.float16
    ours = (found.view(-1, width).double() - exact).abs()
    stock_error = (theirs.view(-1, width).double() - exact).abs()
    assert ours.mean() <= stock_error.mean() * 1.001
    assert ours.max() <= max(float(stock_error.max()), float(np.finfo(np.float16).eps))
    after = [part.data for home in homes for part in home.data[:2]]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def _compressed(device: TorchDevice, cache: torch.Tensor) -> TorchTensor:
    """As FlexGen stores it: codes, and scales in half precision."""
    home = device.compressed_device.allocate(
        tuple(cache.shape), np.float16, COMPRESS_KV, pin_memory=False
    )
    packed = device.compressed_device.compress(cache, COMPRESS_KV)
    for part, source in zip(home.data[:2], packed.data[:2], strict=True):
        part.data.copy_(source.data)
    return home


def _exact_codes(home: TorchTensor, positions: int, new: torch.Tensor) -> torch.Tensor:
    """``(rows * heads, positions, width)`` in double precision; the last position is ``new``."""
    codes, scales, _ = home.data
    pairs = torch.stack([codes.data >> 4, codes.data & 15], dim=-1).flatten(-2)
    rate, low = scales.data.double().split(1, dim=-1)
    numbers = pairs.unflatten(-1, (-1, 64)).double() / rate + low
    whole = numbers.flatten(-2)[:positions, :, : home.shape[2]].clone()
    whole[positions - 1] = new[0]
    return whole.transpose(0, 1)
