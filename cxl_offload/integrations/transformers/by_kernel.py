"""Attention of few queries a sequence by the kernel, over all of a cache or over what is in a tier.

Where a cache lies on the accelerator in part, that part is attended to there while the kernel reads
the other, and the two are joined by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cxl_offload.integrations.transformers.int4_rows import as_cache, decoded
from cxl_offload.integrations.transformers.masks import forms_of
from cxl_offload.integrations.transformers.parted_states import PartedStates
from cxl_offload.ops.attention import (
    Partial,
    combine,
    decode_attention,
    decode_attention_partial,
)
from cxl_offload.ops.attention_by_torch import ScoreOptions, partial_by_torch
from cxl_offload.ops.threads import Team


@dataclass(frozen=True, slots=True)
class Scores:
    """What a model says about scores, for all positions.

    Attributes
    ----------
    mask
        ``(batch, 1 or heads, queries, positions)``: bool, or numbers to add.
    scale
        Their factor; None: ``1 / sqrt(dim)``.
    options
        Of transformers' attentions: ``softcap``, ``s_aux`` (sinks) and ``position_bias``.
    """

    mask: torch.Tensor | None
    scale: float | None
    options: Mapping[str, Any]

    def on_host(self, query: torch.Tensor, first: int, end: int) -> dict[str, Any]:
        """What the kernel is told of the positions from ``first`` on, sinks left out."""
        attended = bias = None
        if self.mask is not None:
            forms = forms_of(self.mask)
            attended = forms.attended_from(self.mask, query.shape[0], first)
            bias = forms.bias(self.mask)
        if (more := self.options.get("position_bias")) is not None:
            more = more.to("cpu", torch.float32).expand(*query.shape[:3], end)
            bias = more if bias is None else bias + more
        return {
            "mask": attended,
            "scale": self.scale,
            "soft_cap": self.options.get("softcap"),
            "bias": None if bias is None else bias[..., first:],
            "causal": False,  # the mask says what each query sees
        }

    def on_accelerator(self, query: torch.Tensor, end: int) -> ScoreOptions:
        """Of the positions up to ``end``, on the query's device."""
        mask = bias = None
        if self.mask is not None:
            of_head = self.mask[..., :end].to(query.device)
            mask, bias = (of_head, None) if of_head.dtype is torch.bool else (None, of_head)
        if (more := self.options.get("position_bias")) is not None:
            more = more[..., :end].to(query.device, torch.float32)
            bias = more if bias is None else bias + more
        cap = self.options.get("softcap")
        return ScoreOptions(scale=self.scale, soft_cap=cap, mask=mask, bias=bias)


def by_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, team: Team
) -> torch.Tensor:
    """Over a cache in host memory: ``(batch, queries, heads, dim)``, on the query's device."""
    one = query.shape[2] == 1
    queries, told = query.squeeze(2) if one else query, scores.on_host(query, 0, key.shape[2])
    if one and told["bias"] is not None:
        told["bias"] = told["bias"][:, :, 0]
    out = decode_attention(
        _on_cpu(queries),
        _read(key),
        _read(value),
        sinks=scores.options.get("s_aux"),
        threads=team,
        **told,
    )
    if not query.is_cpu:
        out = out.to(query.device)
    return out.unsqueeze(1) if one else out.transpose(1, 2).contiguous()


def by_kernel_and_accelerator(
    query: torch.Tensor, key: PartedStates, value: torch.Tensor, scores: Scores, team: Team
) -> torch.Tensor:
    """Over a cache in two places: ``(batch, queries, heads, dim)``, on the query's device.

    What the kernel is told comes from the accelerator first. Then that is given its part, and works
    while the kernel reads; only when it has read is there something to wait for.
    """
    assert isinstance(value, PartedStates)
    end, width = key.head.shape[2], query.shape[-1]
    queries, told = _on_cpu(query), scores.on_host(query, end, key.shape[2])
    near = query.to(key.head.device)  # a kept cache outlives the block whose model computed there
    head = partial_by_torch(
        near,
        key.head,
        value.head,
        scores.on_accelerator(near, end),
        numbers=lambda kept: _numbers(kept, width),
    )
    tail = decode_attention_partial(
        queries, _read(key.tail), _read(value.tail), threads=team, **told
    )
    device = query.device
    parts = [Partial(part.out.to(device), part.log_sum_exp.to(device)) for part in (head, tail)]
    if (sinks := scores.options.get("s_aux")) is not None:
        alone = sinks.detach().to(device, torch.float32).view(1, -1, 1)
        parts.append(
            Partial(torch.zeros_like(parts[0].out), alone.expand(parts[0].log_sum_exp.shape))
        )
    return combine(parts).out.to(query.dtype).transpose(1, 2).contiguous()


def _on_cpu(query: torch.Tensor) -> torch.Tensor:
    return (query if query.is_cpu else query.to("cpu")).contiguous()


def _read(kept: torch.Tensor) -> Any:
    """What the kernel takes."""
    return as_cache(kept) if kept.dtype is torch.uint8 else kept


def _numbers(kept: torch.Tensor, width: int) -> torch.Tensor:
    return decoded(kept, width, torch.float32) if kept.dtype is torch.uint8 else kept.float()
