"""FlexGen without the computation of the prompt, to time decoding over long prompts.

On CPUs a prompt of 32 x 512 tokens takes minutes, and decoding, which is what depends on where the
KV cache lies, seconds. Inside :func:`skipped_prompt` the layers pass the prompt on unchanged and
fill the KV cache with seeded numbers; every token after the first is computed as ever. Tokens mean
nothing then, but both sides of a comparison must still agree on them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from flexgen.pytorch_backend import TorchDevice, TorchTensor

__all__ = ["skipped_prompt"]


@functools.lru_cache(maxsize=2)
def _cache(positions: int, columns: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    k, v = (torch.randn(positions, columns, width, generator=random) for _ in "kv")
    return k.half(), v.half()


def _mha(device: TorchDevice, inputs: TorchTensor, *rest: Any) -> Any:
    rows, positions, hidden = inputs.shape
    heads = rest[11]
    k, v = _cache(positions, rows * heads, hidden // heads)
    hidden_states, *made = (
        TorchTensor.create_from_torch(each, device) for each in (inputs.data, k, v)
    )
    *_, compress, how = rest
    if compress:
        made = [device.compressed_device.compress(each, how) for each in (k, v)]
    return hidden_states, *made


@contextlib.contextmanager
def skipped_prompt() -> Iterator[None]:
    """FlexGen's devices compute decoding only, until the end of the block."""
    mha, mlp = TorchDevice.mha, TorchDevice.mlp

    def decoding_mlp(device: TorchDevice, inputs: TorchTensor, *rest: Any) -> Any:
        if inputs.shape[1] > 1:
            return TorchTensor.create_from_torch(inputs.data, device)
        return mlp(device, inputs, *rest)

    TorchDevice.mha, TorchDevice.mlp = _mha, decoding_mlp
    try:
        yield
    finally:
        TorchDevice.mha, TorchDevice.mlp = mha, mlp
