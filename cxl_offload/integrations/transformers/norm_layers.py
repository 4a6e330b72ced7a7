"""Root-mean-square norms of a model by the kernel, in one pass."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from cxl_offload.integrations.transformers.attention import BlockAttention
from cxl_offload.integrations.transformers.linear_layers import (
    Fastest,
    give_back_forward,
    take_linear_layers,
)
from cxl_offload.objects.kind_store import TierStore
from cxl_offload.ops.norm import rms_norm_or_none
from cxl_offload.ops.view import is_recording


def _formula(function: object) -> tuple[object, ...] | None:
    """What a function does, for a comparison; the same for a copy of it in another class."""
    code = getattr(function, "__code__", None)
    if code is None or getattr(function, "__globals__", {}).get("torch") is not torch:
        return None
    return code.co_code, code.co_consts, code.co_names, code.co_varnames, code.co_argcount


_KNOWN = _formula(LlamaRMSNorm.forward)
"""Most families have a copy of this class with a name of their own."""


def _is_known(module: nn.Module) -> bool:
    return (
        "forward" not in vars(module)
        and _formula(type(module).forward) == _KNOWN
        and isinstance(getattr(module, "weight", None), torch.Tensor)
        and isinstance(getattr(module, "variance_epsilon", None), float)
    )


def take_kernel_layers(
    model: nn.Module,
    rows: int | Fastest,
    block: BlockAttention,
    store: TierStore,
    stack: contextlib.ExitStack,
) -> None:
    """Let kernels compute linear layers of up to so many rows, and norms of any number."""
    block.ended = False
    stack.callback(setattr, block, "ended", True)
    take_linear_layers(model, rows, block, store, stack)
    take_norm_layers(model, block, stack)


def take_norm_layers(model: nn.Module, block: BlockAttention, stack: contextlib.ExitStack) -> int:
    """Let the kernel compute norms whose formula is that of ``LlamaRMSNorm``.

    Their ``forward`` is known by its code, not by its name, which every family chooses anew. It is
    replaced on the object and given back when ``stack`` closes; norms of another formula, and those
    whose ``forward`` somebody replaced before, are left alone.

    Returns
    -------
    int
        Norms that were taken.
    """
    taken = [module for module in model.modules() if _is_known(module)]
    for module in taken:
        module.forward = types.MethodType(_forward(block), module)
        stack.callback(give_back_forward, module, module.forward)
    return len(taken)


def _forward(block: BlockAttention) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """On the threads that the block's attention has."""

    def forward(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if (
            not block.ended
            and not torch.is_grad_enabled()
            and not is_compiling()
            and not torch.is_autocast_enabled("cpu")
            and not is_recording()
            and forward_ad._current_level < 0
        ):
            eps = module.variance_epsilon
            y = rms_norm_or_none(hidden_states, module.weight, eps, block.team)
            if y is not None:
                return y
        stock: torch.Tensor = type(module).forward(module, hidden_states)
        return stock

    return forward
