"""Inputs of the updates: drawn once from a seed, at any offset from an aligned address."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FLOATS = (F32, BF16, F16)
STATES = (F32, BF16)


@dataclass(frozen=True)
class Inputs:
    """Tensors of an Adam step."""

    param: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    copy: torch.Tensor | None = None

    def all(self) -> list[torch.Tensor]:
        tensors = [self.param, self.grad, self.exp_avg, self.exp_avg_sq]
        return [*tensors, *([] if self.copy is None else [self.copy])]

    def clone(self) -> Inputs:
        names = ("param", "grad", "exp_avg", "exp_avg_sq", "copy")
        values = {name: getattr(self, name) for name in names}
        return replace(
            self, **{name: None if v is None else moved(v, 0) for name, v in values.items()}
        )


def moved(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy that begins ``offset`` elements after an aligned address."""
    base = torch.empty(tensor.numel() + offset + 64, dtype=tensor.dtype)
    view = base[offset : offset + tensor.numel()].view(tensor.shape)
    return view.copy_(tensor)


def draw(
    numel: int,
    *,
    param: torch.dtype = F32,
    grad: torch.dtype = F32,
    state: torch.dtype = F32,
    copy: torch.dtype | None = None,
    offsets: tuple[int, int, int, int] = (0, 0, 0, 0),
    seed: int = 1,
) -> Inputs:
    source = torch.Generator().manual_seed(seed)

    def normal(scale: float, dtype: torch.dtype, offset: int) -> torch.Tensor:
        return moved((torch.randn(numel, generator=source) * scale).to(dtype), offset)

    return Inputs(
        param=normal(0.5, param, offsets[0]),
        grad=normal(0.1, grad, offsets[1]),
        exp_avg=normal(0.05, state, offsets[2]),
        exp_avg_sq=normal(0.1, state, offsets[3]).square_(),
        copy=None if copy is None else torch.full((numel,), 7.0, dtype=copy),
    )


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes, with every NaN alike: which NaN it is depends on the order of operands."""
    plain = tensor.detach().clone(memory_format=torch.contiguous_format)
    if plain.is_floating_point():
        plain[plain.isnan()] = float("nan")
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def same_bits(first: Inputs, second: Inputs) -> bool:
    pairs = zip(first.all(), second.all(), strict=True)
    return all(bits(a) == bits(b) for a, b in pairs)
