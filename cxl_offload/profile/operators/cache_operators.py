"""What decoding does with a layer's keys and values, as FlexGen and this package do it."""

from __future__ import annotations

from collections import deque

import torch
from torch.nn import functional

from cxl_offload.ops.attention import decode_attention, from_flexgen


def copied_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """As FlexGen computes it; over copies in single precision on the CPU.

    Parameters
    ----------
    q
        ``(columns, 1, dim)``, float16; columns are sequences times heads.
    k, v
        ``(positions, columns, dim)``, float16, where ``q`` is.
    mask
        ``(sequences, positions)``, bool.

    Returns
    -------
    torch.Tensor
        As ``q``.
    """
    positions, columns, dim = k.shape
    rows = mask.shape[0]
    keys = k.permute(1, 2, 0).reshape(columns, dim, positions)
    values = v.permute(1, 0, 2).reshape(columns, positions, dim)
    if not q.is_cuda:
        q, keys, values = q.float(), keys.float(), values.float()
    scores = torch.bmm(q, keys).view(rows, columns // rows, 1, positions)
    scores = torch.where(mask.view(rows, 1, 1, positions), scores, -1e4)
    weights = functional.softmax(scores.view(columns, 1, positions), dim=2)
    return torch.bmm(weights, values).half()


def attention_in_place(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """As :func:`copied_attention`, by the CPU and over keys and values in its memory."""
    rows = mask.shape[0]
    value = decode_attention(
        q.cpu().view(rows, q.shape[0] // rows, -1),
        from_flexgen(k, rows),
        from_flexgen(v, rows),
        mask=mask.cpu(),
        scale=1.0,
    )
    return value.view(q.shape).to(q.device)


class CacheLoader:
    """Copies keys and values into fresh memory of a device.

    What the calls before made is kept: a framework loads a layer's while it uses another's, so
    that it never writes to the memory that it has just written, and finds in the caches.
    """

    KEPT = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: deque[list[torch.Tensor]] = deque(maxlen=self.KEPT)

    def __call__(self, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        """Both, on the device."""
        made = []
        for source in (k, v):
            fresh = torch.empty(source.shape, dtype=source.dtype, device=self._device)
            made.append(fresh.copy_(source, non_blocking=True))
        self._kept.append(made)
        return made
