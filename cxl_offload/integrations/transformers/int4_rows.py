"""Keys and values as 4-bit codes: a position of a head is one row of bytes, codes before scales.

A row is whole groups of 64 codes, two a byte, then two float16 numbers for each group: its least
value and the step between two codes. So a cache of codes is one tensor, like any other cache.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from cxl_offload.ops.int4_cache import Int4Cache
from cxl_offload.plan.kv_types import CODE_BYTES, GROUP, SCALE_BYTES

_LARGEST_CODE = 15
_MOST = torch.finfo(torch.float16).max


def encoded(states: torch.Tensor) -> torch.Tensor:
    """Rows of ``(batch, heads, positions, dim)`` numbers: uint8, the last dimension row_bytes().

    A number is off by at most half a step of its group, a fifteenth of its range, besides the
    rounding of both scales to float16.
    """
    dim = states.shape[-1]
    numbers = functional.pad(states.float(), (0, -dim % GROUP), mode="constant")
    if dim % GROUP:  # what fills a group is no number of its own
        numbers[..., dim:] = numbers[..., dim - 1 : dim]
    groups = numbers.unflatten(-1, (-1, GROUP))  # type: ignore[no-untyped-call]
    low, most = groups.amin(-1).clamp(-_MOST, _MOST), groups.amax(-1)
    low = low.half()
    step = ((most - low.float()) / _LARGEST_CODE).clamp(0, _MOST).half()
    divisor = step.float().masked_fill(step == 0, 1).unsqueeze(-1)
    codes = ((groups - low.float().unsqueeze(-1)) / divisor).round().clamp(0, _LARGEST_CODE)
    codes = codes.to(torch.uint8).flatten(-2)
    packed = codes[..., 0::2] << 4 | codes[..., 1::2]
    scales = torch.stack([low, step], dim=-1).flatten(-2).view(torch.uint8)
    return torch.cat([packed, scales], dim=-1)


def as_cache(rows: torch.Tensor) -> Int4Cache:
    """What the kernel reads; nothing is copied."""
    groups = rows.shape[-1] // (CODE_BYTES + SCALE_BYTES)
    codes = rows.narrow(-1, 0, groups * CODE_BYTES)
    scales = rows.narrow(-1, groups * CODE_BYTES, groups * SCALE_BYTES).view(torch.float16)
    pairs: torch.Tensor = scales.unflatten(-1, (groups, 2))  # type: ignore[no-untyped-call]
    return Int4Cache(codes, pairs, "low, step")


def decoded(rows: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that rows are worth: ``(batch, heads, positions, dim)``, a copy."""
    cache = as_cache(rows)
    codes = torch.stack([cache.codes >> 4, cache.codes & 0xF], dim=-1).flatten(-2)
    groups = codes.unflatten(-1, (-1, GROUP)).float()  # type: ignore[no-untyped-call]
    low, step = cache.scales.float().unsqueeze(-1).unbind(-2)
    numbers: torch.Tensor = (groups * step + low).flatten(-2)
    return numbers[..., :dim].to(dtype)
