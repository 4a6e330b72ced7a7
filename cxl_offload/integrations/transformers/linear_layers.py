"""Linear layers by the kernel over weights where they lie: of few rows, or where it is faster."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.attention import BlockAttention
from cxl_offload.memory import Replicate
from cxl_offload.objects.kind_store import TierStore
from cxl_offload.objects.weight_kinds import KINDS
from cxl_offload.ops.linear import PreparedLinear
from cxl_offload.ops.measured_linear import (
    ALL_TYPES,
    KERNEL,
    TORCH,
    LinearKey,
    LinearWay,
    MeasuredLinear,
    kernel_ways,
)
from cxl_offload.plan.transformers.layout import COPIED_ROWS

Fastest = Literal["fastest"]
"""Each layer by the kernel or by torch, whichever its first call found faster, with any rows."""

WEIGHT_KINDS = frozenset(KINDS)


def policies_with_copies(store: TierStore) -> list[tuple[str, Replicate]]:
    """Kinds whose tensors have copies on several nodes; ``weights`` where all kinds have them."""
    found = [
        (kind, part.policy)
        for kind, parts in store.parts.items()
        for part in parts
        if isinstance(part.policy, Replicate)
    ]
    if WEIGHT_KINDS.issubset(kind for kind, _ in found) and len({each for _, each in found}) == 1:
        return [("weights", found[0][1])]
    return found


def rows_of_linear_layers(asked: int | Fastest | None, store: TierStore) -> int | Fastest:
    """Up to how many rows the kernel computes layers, which alone reads copies near its threads.

    Raises
    ------
    ConfigError
        A negative number, another word, or 0 where weights have copies.
    """
    copies = policies_with_copies(store)
    if asked is None:
        return COPIED_ROWS if copies else 0
    if asked == "fastest":
        return asked
    if not isinstance(asked, int) or isinstance(asked, bool) or asked < 0:
        raise ConfigError(f"linear_rows {asked}: 0 or more, or 'fastest'")
    for kind, policy in copies if asked == 0 else ():
        raise ConfigError(
            f"policy of {kind}: {policy} and linear_rows 0: torch reads the first copy only; leave "
            f"linear_rows out, or bind or interleave {kind}"
        )
    return asked


def rows_by(cpu_linear: str, accelerator: str | None) -> Fastest | None:
    """What ``--cpu-linear`` says of rows.

    Raises
    ------
    ConfigError
        It is neither "torch" nor "fastest", or an accelerator computes the layers.
    """
    if cpu_linear not in ("torch", "fastest"):
        raise ConfigError(f"--cpu-linear {cpu_linear}: must be torch or fastest")
    if cpu_linear == "torch":
        return None
    if accelerator is not None:
        raise ConfigError(
            f"--cpu-linear fastest: {accelerator} computes the layers; leave one of the two out"
        )
    return "fastest"


_choices: WeakKeyDictionary[nn.Module, dict[str, dict[LinearKey, str]]] = WeakKeyDictionary()
"""Of the blocks of a model until now, by where its weights lie and how many threads there are."""


def choices_of(model: nn.Module, store: TierStore) -> dict[LinearKey, str]:
    """Which way earlier blocks found fastest for the layers of a model whose weights lay the same.

    The block that asks adds to them, so only the first of several has to try all ways.
    """
    policies = {kind: [str(part.policy) for part in parts] for kind, parts in store.parts.items()}
    where = f"{torch.get_num_threads()} threads, {sorted(policies.items())}"
    return _choices.setdefault(model, {}).setdefault(where, {})


def take_linear_layers(
    model: nn.Module,
    rows: int | Fastest,
    block: BlockAttention,
    store: TierStore,
    stack: contextlib.ExitStack,
) -> int:
    """Let the kernel compute layers of up to so many rows; the others stay torch's.

    ``"fastest"``: of any number of rows for which the kernel is faster. For prompts it is where the
    processor has no arithmetic for half precision, in which torch is slow then.

    torch has no way to say how a layer is computed, so ``forward`` of every plain ``nn.Linear``
    object is replaced, and given back when ``stack`` closes. Layers of other classes (quantized,
    with adapters) and layers whose ``forward`` somebody replaced before are left alone.

    Returns
    -------
    int
        Layers that were taken.
    """
    layers = [
        module
        for module in model.modules()
        if type(module) is nn.Linear and "forward" not in vars(module)
    ]
    measured = None
    if rows == "fastest":
        ways: dict[str, LinearWay] = {
            **kernel_ways(lambda: block.team),
            TORCH: functional.linear,
        }
        read = sum(layer.weight.nbytes for layer in layers)
        chosen = choices_of(model, store)
        measured = MeasuredLinear(ALL_TYPES, ways, model_bytes=read, chosen=chosen)
    most = sys.maxsize if rows == "fastest" else rows
    for layer in layers:
        forward = _forward(most, block, measured)
        layer.forward = types.MethodType(forward, layer)  # type: ignore[method-assign]
        stack.callback(give_back_forward, layer, layer.forward)
    return len(layers)


def give_back_forward(layer: nn.Module, ours: object) -> None:
    """Undo what a block put in place of ``forward``; what somebody put there since then stays."""
    if vars(layer).get("forward") is ours:
        del layer.forward


def _forward(
    rows: int, block: BlockAttention, measured: MeasuredLinear | None
) -> Callable[[nn.Linear, torch.Tensor], torch.Tensor]:
    """Of one layer, on the threads that the block's attention has."""
    prepared: PreparedLinear | None = None

    def forward(layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch
        nonlocal prepared
        if block.ended or type(layer) is not nn.Linear:  # another class that it was given meanwhile
            stock: torch.Tensor = type(layer).forward(layer, input)
            return stock
        x, weight, bias = input, layer.weight, layer.bias
        if (
            x.numel() <= rows * weight.shape[1]
            and x.dtype is weight.dtype
            and x.dtype in ALL_TYPES
            and x.is_cpu
            and weight.is_cpu
            and not torch.is_grad_enabled()
            and (not torch.is_autocast_enabled("cpu") or torch.get_autocast_dtype("cpu") is x.dtype)
        ):
            if measured is not None and weight.stride(1) == 1:
                key = measured.key(x, weight)
                if measured.chosen.get(key) != KERNEL:
                    return measured.by(key, x, weight, bias)
            found = prepared  # of its own: a deep copy of the layer shares this function
            if found is None or not found.is_of(weight, bias):
                if weight.stride(1) != 1:  # turned: the kernel reads rows
                    return functional.linear(x, weight, bias)
                prepared = found = PreparedLinear(weight, bias)
            return found(x, block.team)
        return functional.linear(x, weight, bias)

    return forward
