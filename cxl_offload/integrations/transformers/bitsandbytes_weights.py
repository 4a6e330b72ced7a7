"""Weights of bitsandbytes, which its layers keep in several places: their codes and scales.

The package is never imported here: who has such weights has loaded it.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from cxl_offload.errors import ConfigError

PACKAGE = "bitsandbytes"


def is_of_bitsandbytes(weight: object) -> bool:
    """Whether a weight is of one of its two classes, for 8 and for 4 bits."""
    return type(weight).__module__.partition(".")[0] == PACKAGE


def held_by_bitsandbytes(weight: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold a weight's codes and scales.

    Tables of up to 256 numbers, which weights share, are left out.
    """
    given: Any = weight
    codes = getattr(given, "CB", None)
    if codes is not None:
        return [codes, given.SCB]
    state = getattr(given, "quant_state", None)
    if state is None:
        return [weight]
    nested = [state.state2.absmax] if getattr(state, "state2", None) is not None else []
    return [weight, state.absmax, *nested]


def codes_beside(weight: torch.Tensor) -> torch.Tensor | None:
    """The tensor of codes whose memory the weight itself shares; None: the weight has its own."""
    codes: torch.Tensor | None = getattr(weight, "CB", None) if is_of_bitsandbytes(weight) else None
    return codes


def share_codes(weight: torch.Tensor) -> None:
    """Let a weight share its codes' memory again, after they got another."""
    if (codes := codes_beside(weight)) is not None:
        weight.data = codes.data


def settle_layers(model: nn.Module) -> None:
    """Bring all layers' weights to where :func:`held_by_bitsandbytes` finds them, for good.

    Raises
    ------
    ConfigError
        A shape of 4 bits that bitsandbytes cannot compute with on this CPU.
    """
    for layer in model.modules():
        weight: Any = getattr(layer, "weight", None)
        if not is_of_bitsandbytes(weight):
            continue
        state: Any = getattr(layer, "state", None)
        if getattr(state, "CB", None) is not None:  # taken from the weight by a forward pass
            weight.CB, weight.SCB = state.CB, state.SCB
            state.CB = state.SCB = None
        settle(weight)


def settle(weight: torch.Tensor) -> None:
    """Let 4-bit codes be packed as the first forward pass on this CPU would do, elsewhere.

    Raises
    ------
    ConfigError
        As :func:`settle_layers`.
    """
    state: Any = getattr(weight, "quant_state", None)
    if state is None or not weight.is_cpu or getattr(state, "packing_format_for_cpu", False):
        return
    outputs, width = state.shape
    with torch.device("meta"):
        layer = importlib.import_module(f"{PACKAGE}.nn").Linear4bit(width, outputs, bias=False)
    layer.weight = weight
    try:
        with torch.no_grad():
            layer.eval()(torch.zeros(1, width, dtype=state.dtype))
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"{PACKAGE} cannot compute with weights of {outputs} x {width} in 4 bits and blocks of "
            f"{state.blocksize} on this CPU: {error}"
        ) from error
