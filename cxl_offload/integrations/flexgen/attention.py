"""CPU attention over the KV cache where it lies, instead of over FlexGen's fp32 copies of it.

FlexGen copies all of K and V into a single-precision workspace for every layer and token, 10 bytes
of traffic an fp16 element. Here the host's pieces of the cache are read once, in their own type, by
:mod:`cxl_offload.ops.attention`; those of ``--compress-cache`` as the 4-bit codes that they are.
FlexGen hands a cache that lies in several places to ``TorchDevice._mixed_device_attention``
untouched, so that is where it is taken over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from flexgen.flex_opt import SelfAttention
from flexgen.pytorch_backend import DeviceType, TorchTensor

from cxl_offload.ops.attention import (
    combine,
    decode_attention,
    decode_attention_partial,
    from_flexgen,
)
from cxl_offload.ops.int4_cache import Int4Cache, int4_from_flexgen

AttentionValue = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class CacheInPlace:
    """K or V of one layer and batch: its pieces, by whole sequences in their order.

    Attributes
    ----------
    pieces
        ``(positions, sequences * heads, head_dim)``, float16, on the accelerator or the host; or
        compressed, on the host.
    loaded
        The accelerator attends over all of it, which a GPU would have loaded.
    """

    pieces: tuple[TorchTensor, ...]
    loaded: bool = False

    def host_views(self, attended: int) -> tuple[torch.Tensor, ...]:
        """What is read of the pieces on the host for the first so many positions."""
        views: list[torch.Tensor] = []
        for piece in self.pieces:
            if _is_compressed(piece):  # the last position is new, and not compressed yet
                views += [part.data[: attended - 1] for part in piece.data[:2]]
            elif _on_host(piece):
                views.append(piece.data[:attended])
        return tuple(views)

    @property
    def host_columns(self) -> int:
        """Sequences times heads on the host."""
        pieces = (piece for piece in self.pieces if _is_compressed(piece) or _on_host(piece))
        return sum(int(piece.shape[1]) for piece in pieces)


class SelfAttentionInPlace(SelfAttention):  # type: ignore[misc]
    """FlexGen's layer, which gives its cache to the computation instead of a copy."""

    def load_cache(self, cache_home: Any, cache_read_buf: Any, i: int) -> None:
        """Nothing is moved; the prompt (``i`` 0) has no cache yet."""
        if i == 0:
            return
        k_home, v_home = cache_home.val
        cache_read_buf.store(((_in_place(k_home), False), (_in_place(v_home), False)))


class SelfAttentionOnHost(SelfAttention):  # type: ignore[misc]
    """The same where the accelerator's memory is the host's: loads are recorded, and not done."""

    def load_cache(self, cache_home: Any, cache_read_buf: Any, i: int) -> None:
        """Every position up to the new one's, K and V; the prompt (``i`` 0) has no cache yet."""
        if i == 0:
            return
        caches = []
        for home in cache_home.val:
            cache = CacheInPlace(tuple(_pieces(home)), loaded=True)
            for piece in cache.pieces:
                data = piece.data[: self.task.prompt_len + i]
                if _on_host(piece):
                    self.compute.loaded(data)
                elif len(cache.pieces) > 1:
                    self.compute.gathered(data)
            caches.append((cache, False))
        cache_read_buf.store(tuple(caches))


def attend_in_place(
    q: torch.Tensor,
    caches: tuple[CacheInPlace, CacheInPlace],
    new: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor,
    *,
    heads: int,
    on_accelerator: AttentionValue | None,
) -> torch.Tensor:
    """Attention of one new token a sequence; each piece of the cache is read by the nearest device.

    Parameters
    ----------
    q
        ``(sequences * heads, 1, head_dim)``, float16, scaled, on the accelerator.
    caches
        K and V. The row of the new token is written into them, but into compressed ones: FlexGen
        compresses it after it was attended to as it is.
    new
        Its key and value, ``(1, sequences * heads, head_dim)``.
    mask
        ``(sequences, positions)``, bool, on the host; False is padding.
    on_accelerator
        FlexGen's ``_attention_value``; None where the accelerator's memory is the host's.

    Returns
    -------
    torch.Tensor
        ``(sequences, heads, 1, head_dim)``, float16, where ``q`` is.
    """
    values, start = [], 0
    for k, v in zip(caches[0].pieces, caches[1].pieces, strict=True):
        columns = slice(start, start + k.shape[1])
        start = columns.stop
        rows = slice(columns.start // heads, columns.stop // heads)
        attended = mask.shape[1]
        if _is_compressed(k):
            fresh = (new[0][0, columns], new[1][0, columns])
            values.append(_on_codes(q[columns], (k, v), fresh, mask[rows], heads).to(q.device))
            continue
        for piece, row in ((k, new[0]), (v, new[1])):
            piece.data[attended - 1].copy_(row[0, columns])
        keys, entries = k.data[:attended], v.data[:attended]
        if on_accelerator is None or _on_host(k):
            values.append(_on_cpu(q[columns], keys, entries, mask[rows], heads).to(q.device))
        else:
            values.append(
                on_accelerator(
                    q[columns],
                    keys.permute(1, 2, 0),
                    entries.permute(1, 0, 2),
                    mask[rows].to(q.device),
                    rows.stop - rows.start,
                    attended,
                    1,
                    heads,
                    q.shape[2],
                ).half()
            )
    return values[0] if len(values) == 1 else torch.cat(values)


def _on_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, heads: int
) -> torch.Tensor:
    sequences = q.shape[0] // heads
    value = decode_attention(
        q.cpu().view(sequences, heads, -1),
        from_flexgen(k, sequences),
        from_flexgen(v, sequences),
        mask=mask,
        scale=1.0,  # the query is scaled already
    )
    return value.unsqueeze(2)


def _on_codes(
    q: torch.Tensor,
    caches: tuple[TorchTensor, TorchTensor],
    new: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor,
    heads: int,
) -> torch.Tensor:
    """Over the codes of the earlier positions and the new one as it is, as FlexGen does it."""
    sequences, earlier = q.shape[0] // heads, mask.shape[1] - 1
    queries = q.cpu().view(sequences, heads, -1)
    keys, values = (_codes(cache, earlier, sequences) for cache in caches)
    lengths = [earlier] * sequences  # the mask has one column more
    old = decode_attention_partial(queries, keys, values, lengths=lengths, mask=mask, scale=1.0)
    k_new, v_new = (row.cpu().view(sequences, heads, 1, -1) for row in new)
    last = decode_attention_partial(queries, k_new, v_new, scale=1.0)
    return combine((old, last)).out.half().unsqueeze(2)


def _codes(cache: TorchTensor, positions: int, sequences: int) -> Int4Cache:
    codes, scales, _ = cache.data
    return int4_from_flexgen(codes.data[:positions], scales.data[:positions], sequences)


def _in_place(home: TorchTensor) -> CacheInPlace:
    return CacheInPlace(tuple(_pieces(home)))


def _pieces(home: TorchTensor) -> Iterator[TorchTensor]:
    if home.device.device_type != DeviceType.MIXED:
        yield home
        return
    yield from (piece for piece in home.data[0] if piece is not None)


def _is_compressed(piece: TorchTensor) -> bool:
    return bool(piece.device.device_type == DeviceType.COMPRESSED)


def _on_host(piece: TorchTensor) -> bool:
    return bool(piece.device.device_type == DeviceType.CPU)
