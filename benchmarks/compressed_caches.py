"""One KV cache in fewer bits: 8-bit floats, and 4-bit codes as FlexGen keeps them."""

from __future__ import annotations

import torch

import cxl_offload
from cxl_offload.ops.int4_cache import Int4Cache, int4_from_flexgen

__all__ = ["Cache", "cache_bytes", "fewer_bits", "worth"]

FLOAT8 = {"this, e4m3": torch.float8_e4m3fn, "this, e5m2": torch.float8_e5m2}
INT4, INT4_FLEXGEN = "this, 4-bit", "this, 4-bit, FlexGen's layout"
INT4_GROUP = 64

Cache = torch.Tensor | Int4Cache


def fewer_bits(k: torch.Tensor, v: torch.Tensor) -> dict[str, tuple[Cache, Cache]]:
    """K and V, ``(b, h, s, d)``, in every smaller format; 4 bits where heads are whole groups."""
    small: dict[str, tuple[Cache, Cache]] = {}
    for name, eight in FLOAT8.items():
        small[name] = (_eight_bits(k, eight), _eight_bits(v, eight))
    if k.shape[3] % INT4_GROUP == 0:
        packed = int4_of(k), int4_of(v)
        small[INT4] = packed
        small[INT4_FLEXGEN] = (flexgen_layout(packed[0]), flexgen_layout(packed[1]))
    return small


def _eight_bits(cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return cxl_offload.empty(tuple(cache.shape), dtype=dtype, pages="thp").copy_(cache)


def cache_bytes(cache: Cache) -> int:
    """Of K or V, with the scales of codes."""
    parts = [cache.codes, cache.scales] if isinstance(cache, Int4Cache) else [cache]
    return sum(part.numel() * part.element_size() for part in parts)


def int4_of(cache: torch.Tensor) -> Int4Cache:
    """``(b, h, s, d)`` as FlexGen quantises: 16 steps from the least to the largest of 64."""
    *outer, dim = cache.shape
    codes = cxl_offload.empty((*outer, dim // 2), dtype=torch.uint8, pages="thp")
    scales = cxl_offload.empty((*outer, dim // INT4_GROUP, 2), dtype=torch.float16, pages="thp")
    for sequence in range(outer[0]):  # one at a time: less memory
        groups = cache[sequence].float().unflatten(-1, (-1, INT4_GROUP))
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        rate = 15 / (high - low)
        steps = ((groups - low) * rate).round_().clamp_(0, 15).to(torch.uint8).flatten(-2)
        codes[sequence] = steps[..., ::2] << 4 | steps[..., 1::2]
        scales[sequence] = torch.cat([rate, low], dim=-1)
    return Int4Cache(codes, scales, "rate, low")


def flexgen_layout(cache: Int4Cache) -> Int4Cache:
    """The same codes as FlexGen lays them out: (seq, batch * heads, ...)."""
    batch = cache.codes.shape[0]
    turned = []
    for part in (cache.codes, cache.scales):
        moved = part.permute(2, 0, 1, *range(3, part.dim())).flatten(1, 2)
        turned.append(cxl_offload.empty(tuple(moved.shape), dtype=part.dtype, pages="thp"))
        turned[-1].copy_(moved)
    return int4_from_flexgen(turned[0], turned[1], batch)


def worth(cache: Cache, heads: int) -> torch.Tensor:
    """The numbers of the last heads of the last sequence, in float64."""
    if not isinstance(cache, Int4Cache):
        return cache[-1, -heads:].double()
    codes, scales = cache.codes[-1, -heads:], cache.scales[-1, -heads:].double()
    pairs = torch.stack([codes >> 4, codes & 15], dim=-1).flatten(-2).double()
    rate, low = scales.split(1, dim=-1)
    return (pairs.unflatten(-1, (-1, INT4_GROUP)) / rate + low).flatten(-2)
