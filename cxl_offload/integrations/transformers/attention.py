"""The attention that models ask transformers for by name: few queries a sequence by our kernel.

transformers lets anyone register an attention and the function that makes its mask. A model keeps
the attention it had (eager or sdpa) for what the kernel does not compute: prompts, long
continuations of a cache, weights that are asked for. So there is one registered name for each of
the two.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

import torch
from torch.compiler import is_compiling
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.by_kernel import (
    Scores,
    by_kernel,
    by_kernel_and_accelerator,
)
from cxl_offload.integrations.transformers.masks import forms_of, mask_maker
from cxl_offload.integrations.transformers.parted_states import PartedStates
from cxl_offload.integrations.transformers.room import SMALL_TYPES, as_states
from cxl_offload.ops.threads import Team, team_for
from cxl_offload.ops.view import untraced
from cxl_offload.plan.kv_types import int4_row_bytes

OWN_ATTENTIONS = ("eager", "sdpa")
"""What a model may compute prompts with."""

FEW_QUERIES = 32
"""More than assisted decoding checks at once, which drafts up to 20 tokens."""

_KERNEL_TYPES = (torch.float32, torch.bfloat16, torch.float16)

_KEPT_SMALL = (*SMALL_TYPES, torch.uint8)
"""What a cache may have in place of the type of its queries; uint8: rows of 4-bit codes."""

_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "is_causal",  # one query sees all there is, several have a mask
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
"""Options of transformers' attentions that change nothing where the kernel computes."""

_OF_SCORES = frozenset({"position_bias", "s_aux", "softcap"})
"""Options that the kernel computes: what is added to scores, sinks, and a soft cap."""

_KNOWN = _WITHOUT_EFFECT | _OF_SCORES


@dataclass(slots=True)
class AttentionCalls:
    """How often a layer's attention was computed, and by whom.

    Attributes
    ----------
    kernel
        Calls over the cache where it lies.
    joined
        Those of them whose cache lies on the accelerator in part: it computed that part.
    several
        Those of the kernel's with several queries a sequence, as of drafted tokens.
    prompt
        Calls with several queries a sequence, by the model's own attention.
    accelerator
        Calls with few queries a sequence over a cache that lies on the accelerator, all of it, by
        the model's own attention there.
    own
        Calls with few queries a sequence that the kernel does not compute, by the reason.
    """

    kernel: int = 0
    joined: int = 0
    several: int = 0
    prompt: int = 0
    accelerator: int = 0
    own: dict[str, int] = field(default_factory=dict)

    def forget(self) -> None:
        """Begin to count again."""
        fresh = type(self)()
        for each in fields(self):
            setattr(self, each.name, getattr(fresh, each.name))


class BlockAttention:
    """What the attention of one block's models goes by.

    Parameters
    ----------
    few_queries
        Up to so many a sequence are computed by the kernel, after the prompt.
    threads
        By the node that they read, as a plan says; None: where the kernel finds work.

    Attributes
    ----------
    ended
        Whether the block is over: what wraps a layer, or is a copy of it, computes by torch then.
    """

    __slots__ = ("_planned", "calls", "ended", "few_queries", "team")

    def __init__(
        self, few_queries: int = FEW_QUERIES, threads: Mapping[int, int] | None = None
    ) -> None:
        self.calls = AttentionCalls()
        self.ended = False
        self.few_queries = few_queries
        self._planned = threads
        self.choose_threads()

    def choose_threads(self) -> None:
        """As many as the rest of the model runs on; asked once a step, not once a layer."""
        count = torch.get_num_threads()
        planned = self._planned
        takes_plan = planned is not None and sum(planned.values()) == count
        self.team: Team = team_for(planned if takes_plan else count)


class ThreadsOfAStep:
    """A hook of a model: the block chooses its threads before every step.

    A file cannot have it: what a block put into a model ends with it.
    """

    def __init__(self, block: BlockAttention) -> None:
        self._block = block

    def __call__(self, *_: object) -> None:
        self._block.choose_threads()

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "a model cannot be pickled in its offload() block: leave it, or save state_dict()"
        )


_blocks: weakref.WeakKeyDictionary[torch.nn.Module, BlockAttention] = weakref.WeakKeyDictionary()


def take_part(model: torch.nn.Module, block: BlockAttention | None) -> None:
    """The attention of a model's modules goes by ``block`` from now on; None: by none."""
    for module in model.modules():
        if block is None:
            _blocks.pop(module, None)
        else:
            _blocks[module] = block


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


def _is_prompt(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, few: int) -> bool:
    """Whether several queries are the model's own attention's to compute.

    Those of a first prompt see states that are not in the cache yet, or in a fixed cache are told
    apart by no mask. Many queries multiply matrices, which is no work for a kernel that reads.
    """
    count = query.shape[2]
    if count == 1:
        return False
    return count == key.shape[2] or mask is None or count > few


def _why_not(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    options: dict[str, Any],
) -> str:
    """Why the kernel does not compute these few queries a sequence; empty when it does."""
    dtype, width = key.dtype, query.shape[-1]
    if dtype is not value.dtype or not (
        (dtype is query.dtype or dtype in _KEPT_SMALL) and query.dtype in _KERNEL_TYPES
    ):
        return f"types {query.dtype}, {key.dtype}, {value.dtype}"
    if dtype is torch.uint8:
        width = int4_row_bytes(width)
    if not width == key.shape[-1] == value.shape[-1]:
        return "keys and values of different widths"
    kept = key.tail if isinstance(key, PartedStates) else key
    if kept.device.type != "cpu":
        return f"a cache on {kept.device.type}"
    if mask is not None and (
        mask.dim() != 4 or mask.shape[-1] != key.shape[2] or mask.shape[-2] != query.shape[2]
    ):
        return "a mask that is not as long as the cache"
    if dropout:
        return "dropout"
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        return "gradients"
    if not options.keys() <= _KNOWN:
        for name, given in options.items():
            if name not in _KNOWN and given is not None and given is not False:
                return f"option {name}"
    return ""


def _eager(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    given: Mapping[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    eager = eager_attention_of(module)
    if eager is None:
        raise NotImplementedError(
            f"{type(module).__name__}: no eager_attention_forward beside it; load the model "
            "with attn_implementation='sdpa'"
        )
    if mask is not None:
        mask = forms_of(mask).added(mask, query.dtype)
    return eager(module, query, key, value, mask, **given)  # type: ignore[no-any-return]


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
        if is_compiling():
            given = {"scaling": scaling, "dropout": dropout, **options}
            return as_it_is(module, query, key, value, attention_mask, **given)
        block = _blocks.get(module) or BlockAttention()
        calls = block.calls
        if _is_prompt(query, key, attention_mask, block.few_queries):
            calls.prompt += 1
        elif isinstance(key, PartedStates) and not key.tail.shape[2]:
            calls.accelerator += 1
        elif why := _why_not(query, key, value, attention_mask, dropout, options):
            calls.own[why] = calls.own.get(why, 0) + 1
        else:
            calls.kernel += 1
            calls.several += query.shape[2] > 1
            scores = Scores(attention_mask, scaling, options)
            if isinstance(key, PartedStates):
                calls.joined += 1
                return by_kernel_and_accelerator(query, key, value, scores, block.team), None
            return by_kernel(query, key, value, scores, block.team), None
        key, value = as_states(key, query), as_states(value, query)
        given = {"scaling": scaling, "dropout": dropout, **options}
        if own == "sdpa":
            made = sdpa_attention_forward(module, query, key, value, attention_mask, **given)
            return made  # type: ignore[no-any-return]
        return _eager(module, query, key, value, attention_mask, given)

    as_it_is = untraced(attend)
    return attend


for _own in OWN_ATTENTIONS:
    AttentionInterface.register(registered_name(_own), _attention(_own))
    AttentionMaskInterface.register(registered_name(_own), mask_maker(_own))
