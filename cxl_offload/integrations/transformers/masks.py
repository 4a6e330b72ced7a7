"""Masks of a block's models: made once a step, and turned once into what each attention reads.

All layers of a kind are given one mask. What the kernel or eager attention reads of it is kept
beside it for as long as the mask lives. Masks that somebody else made may be written to between two
calls, so nothing is kept of those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary
from transformers.masking_utils import eager_mask, sdpa_mask


class MaskForms:
    """What has been made of one mask; the mask itself is given to every method.

    A mask is ``(batch, 1 or heads, queries, positions)``: bool, or numbers to add to scores.
    """

    __slots__ = ("_added", "_attended", "_bias", "_ends", "parts")

    def __init__(self) -> None:
        self.parts: dict[tuple[int, int], torch.Tensor] = {}
        self._attended: torch.Tensor | None = None
        self._ends: dict[int, torch.Tensor] = {}
        self._bias: torch.Tensor | None = None
        self._added: torch.Tensor | None = None

    def attended(self, mask: torch.Tensor, batch: int) -> torch.Tensor | None:
        """Positions that any query attends to: bool ``(batch, positions)``, contiguous; or all."""
        if mask.dtype is not torch.bool:
            return None
        if self._attended is None:
            rows = mask[:, 0, 0] if mask.shape[1] == mask.shape[2] == 1 else mask.any(2).any(1)
            self._attended = rows.expand(batch, -1).to("cpu").contiguous()
        return self._attended

    def attended_from(self, mask: torch.Tensor, batch: int, first: int) -> torch.Tensor | None:
        """The same of the positions from ``first`` on."""
        attended = self.attended(mask, batch)
        if attended is None or not first:
            return attended
        if first not in self._ends:
            self._ends[first] = attended[:, first:].contiguous()
        return self._ends[first]

    def bias(self, mask: torch.Tensor) -> torch.Tensor | None:
        """What to add to scores, float32 of the mask's shape; None where all queries see alike."""
        if mask.dtype is torch.bool and mask.shape[1] == mask.shape[2] == 1:
            return None
        if self._bias is None:
            if mask.dtype is torch.bool:
                hidden = torch.zeros(mask.shape).masked_fill_(~mask.to("cpu"), -math.inf)
                self._bias = hidden
            else:
                self._bias = mask.to("cpu", torch.float32)
        return self._bias

    def added(self, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The mask as the numbers that eager attention adds to its scores."""
        if mask.dtype is not torch.bool:
            return mask
        if self._added is None or self._added.dtype is not dtype:
            least = torch.finfo(dtype).min
            zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            self._added = zeros.masked_fill_(~mask, least)
        return self._added


_made_here: MutableMapping[torch.Tensor, MaskForms] = WeakIdKeyDictionary()


def forms_of(mask: torch.Tensor) -> MaskForms:
    """What was made of this mask already, or nothing yet."""
    return _made_here.get(mask) or MaskForms()


def mask_part(mask: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """These rows of a mask; of one made here the same tensor for every layer."""
    forms = _made_here.get(mask)
    if forms is None:
        return mask[begin:end]
    part = forms.parts.get((begin, end))
    if part is None:
        # A copy: a view would keep the mask alive, and with it what is kept beside it.
        part = forms.parts[begin, end] = mask[begin:end].clone()
        _made_here[part] = MaskForms()
    return part


def mask_maker(own: str) -> Callable[..., torch.Tensor | None]:
    """The function by which models make masks whose own attention is ``own``."""
    of_prompts = eager_mask if own == "eager" else sdpa_mask

    def make_mask(*, q_length: int, kv_length: int, **given: Any) -> torch.Tensor | None:
        """True and false where the kernel may read it; else as the own attention adds."""
        if q_length > 1 and q_length == kv_length:
            made = of_prompts(q_length=q_length, kv_length=kv_length, **given)
            return made  # type: ignore[no-any-return]
        if q_length > 1 and own == "eager":
            given["allow_is_causal_skip"] = False  # eager attention hides nothing by itself
        mask: torch.Tensor | None = sdpa_mask(q_length=q_length, kv_length=kv_length, **given)
        if mask is not None:
            _made_here[mask] = MaskForms()
        return mask

    return make_mask
