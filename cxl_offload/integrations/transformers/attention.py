"""The attention that models ask transformers for by name: one query a sequence by our kernel.

transformers lets anyone register an attention and the function that makes its mask. A model keeps
the attention it had (eager or sdpa) for what the kernel does not compute: prompts, several queries
at once, positions weighed by more than a mask. So there is one registered name for each of the two.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from cxl_offload.integrations.transformers.room import SMALL_TYPES
from cxl_offload.ops.attention import decode_attention

__all__ = ["OWN_ATTENTIONS", "AttentionCalls", "count_in", "eager_attention_of", "registered_name"]

OWN_ATTENTIONS = ("eager", "sdpa")
"""What a model may compute prompts with."""

_KERNEL_TYPES = (torch.float32, torch.bfloat16, torch.float16)

_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "is_causal",  # one query sees all there is
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "sliding_window",  # the mask has it
        "use_cache",
    }
)
"""Options of transformers' attentions that change nothing for one query a sequence."""


@dataclass(slots=True)
class AttentionCalls:
    """How often a layer's attention was computed, and by whom.

    Attributes
    ----------
    kernel
        Calls over the cache where it lies.
    prompt
        Calls with several queries a sequence, by the model's own attention.
    own
        Calls with one query a sequence that the kernel does not compute, by the reason.
    """

    kernel: int = 0
    prompt: int = 0
    own: dict[str, int] = field(default_factory=dict)


_calls: weakref.WeakKeyDictionary[torch.nn.Module, AttentionCalls] = weakref.WeakKeyDictionary()


def count_in(model: torch.nn.Module, calls: AttentionCalls | None) -> None:
    """Count the attention of a model's modules in ``calls`` from now on; None: no more."""
    for module in model.modules():
        if calls is None:
            _calls.pop(module, None)
        else:
            _calls[module] = calls


def registered_name(own: str) -> str:
    """What a model asks for whose own attention is ``own``."""
    return f"cxl_offload_{own}"


def eager_attention_of(module: torch.nn.Module) -> Callable[..., Any] | None:
    """The function by which the file that defines a module computes attention step by step.

    Every file of transformers that follows its conventions has one of this name.
    """
    for base in type(module).__mro__:
        home = sys.modules.get(base.__module__)
        found = getattr(home, "eager_attention_forward", None)
        if found is not None:
            return found  # type: ignore[no-any-return]
    return None


def _why_not(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    options: dict[str, Any],
) -> str:
    """Why the kernel does not compute this one query a sequence; empty when it does."""
    kept_as = (query.dtype, *SMALL_TYPES)
    if query.dtype not in _KERNEL_TYPES or key.dtype is not value.dtype or key.dtype not in kept_as:
        return f"types {query.dtype}, {key.dtype}, {value.dtype}"
    if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        return "keys and values of different widths"
    if key.device.type != "cpu":
        return f"a cache on {key.device.type}"
    if mask is not None and (mask.dtype is not torch.bool or mask.shape[1] != 1):
        return "a mask that is not of true and false, or differs by head"
    if mask is not None and mask.shape[-1] != key.shape[2]:
        return "a mask that is not as long as the cache"
    if dropout:
        return "dropout"
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        return "gradients"
    for name, given in options.items():
        if name not in _WITHOUT_EFFECT and given is not None and given is not False:
            return f"option {name}"
    return ""


def _by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """``(batch, 1, heads, dim)``, on the query's device."""
    attended = None
    if mask is not None:
        attended = mask[:, 0, -1].expand(query.shape[0], -1).to("cpu").contiguous()
    queries = query[:, :, 0].to("cpu").contiguous()
    out = decode_attention(
        queries,
        key,
        value,
        mask=attended,
        scale=scaling,
        # As many as the rest of the model runs on.
        threads=torch.get_num_threads(),
    )
    return out.to(query.device).unsqueeze(1)


def _as_added(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask of true and false as the numbers that eager attention adds to its scores."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    least = torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, least)


def _attention(own: str) -> Callable[..., Any]:
    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        calls = _calls.get(module) or AttentionCalls()
        if query.shape[2] > 1:
            calls.prompt += 1
        elif why := _why_not(query, key, value, attention_mask, dropout, options):
            calls.own[why] = calls.own.get(why, 0) + 1
        else:
            calls.kernel += 1
            return _by_kernel(query, key, value, attention_mask, scaling), None
        key, value = key.to(query), value.to(query)
        given = {"scaling": scaling, "dropout": dropout, **options}
        if own == "sdpa":
            made = sdpa_attention_forward(module, query, key, value, attention_mask, **given)
            return made  # type: ignore[no-any-return]
        eager = eager_attention_of(module)
        if eager is None:
            raise NotImplementedError(
                f"{type(module).__name__}: no eager_attention_forward beside it; load the model "
                "with attn_implementation='sdpa'"
            )
        mask = _as_added(attention_mask, query.dtype)
        return eager(module, query, key, value, mask, **given)  # type: ignore[no-any-return]

    return attend


def _mask(own: str) -> Callable[..., Any]:
    of_prompts = eager_mask if own == "eager" else sdpa_mask

    def make_mask(*, q_length: int, **given: Any) -> torch.Tensor | None:
        """True and false for one query, which the kernel reads; else as the own attention adds."""
        maker = sdpa_mask if q_length == 1 else of_prompts
        return maker(q_length=q_length, **given)  # type: ignore[no-any-return]

    return make_mask


for _own in OWN_ATTENTIONS:
    AttentionInterface.register(registered_name(_own), _attention(_own))
    AttentionMaskInterface.register(registered_name(_own), _mask(_own))
