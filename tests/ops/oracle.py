"""The updates in fp64 numpy, written from the papers, and how far float32 may be from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

Array = np.ndarray

F32_EPS = 2.0**-24
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
# Half of the distance between two subnormals: what rounding may be off near zero.
SMALLEST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}


@dataclass(frozen=True)
class Near:
    """A value, and the bound on the rounding errors of computing it in float32."""

    value: Array
    error: Array


@dataclass(frozen=True)
class Settings:
    step: int = 3
    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    adamw: bool = True
    grad_scale: float = 1.0
    bias_correction: bool = True


def f64(tensor: torch.Tensor) -> Array:
    return tensor.detach().to(torch.float64).numpy().copy()


def gradient(p: Array, g: Array, scale: float, l2: float) -> Near:
    decay = l2 * p if l2 else np.zeros_like(p)  # without decay an infinite parameter adds nothing
    return Near(g * scale + decay, 4 * F32_EPS * (np.abs(g * scale) + np.abs(decay)))


def adam(p: Array, g: Array, m: Array, v: Array, s: Settings) -> tuple[Near, Near, Near]:
    """Kingma and Ba, algorithm 1, with the decay of Loshchilov and Hutter, algorithm 2."""
    with np.errstate(all="ignore"):
        b1, b2 = s.betas
        used = gradient(p, g, s.grad_scale, 0.0 if s.adamw else s.weight_decay)
        mean = b1 * m + (1 - b1) * used.value
        mean_size = np.abs(b1 * m) + np.abs((1 - b1) * used.value)
        mean_error = (1 - b1) * used.error + 4 * F32_EPS * mean_size
        square = b2 * v + (1 - b2) * used.value**2
        square_error = (1 - b2) * (
            2 * np.abs(used.value) + used.error
        ) * used.error + 6 * F32_EPS * np.abs(square)
        c1 = 1 - b1**s.step if s.bias_correction else 1.0
        c2 = 1 - b2**s.step if s.bias_correction else 1.0
        divisor = np.sqrt(square) / np.sqrt(c2) + s.eps
        root_error = np.sqrt(square_error)  # |sqrt(a) - sqrt(b)| is below this and the next
        root_error = np.fmin(root_error, square_error / np.sqrt(square)) / np.sqrt(c2)
        divisor_error = root_error + 6 * F32_EPS * divisor
        decayed = p * (1 - s.lr * s.weight_decay) if s.adamw else p
        ratio = mean / divisor
        # The least that the divisor can have become; when that is nothing, anything may come out.
        least = np.where(divisor > divisor_error, divisor - divisor_error, 0.0)
        ratio_error = (mean_error + np.abs(ratio) * divisor_error) / least
        moved = decayed - s.lr / c1 * ratio
        error = s.lr / c1 * (ratio_error + 8 * F32_EPS * np.abs(ratio))
        return (
            Near(moved, error + 4 * F32_EPS * (np.abs(decayed) + np.abs(moved))),
            Near(mean, mean_error),
            Near(square, square_error),
        )


def close(actual: torch.Tensor, expected: Near) -> None:
    """Asserts that a tensor is the expected value, computed in float32 and rounded to its type."""
    half_ulp, limit = HALF_ULP[actual.dtype], float(torch.finfo(actual.dtype).max)
    got, value = f64(actual), expected.value
    with np.errstate(all="ignore"):
        error = np.nan_to_num(expected.error, nan=0.0, posinf=np.inf)  # x / infinity: exact
        size = np.abs(value)
        # Where rounding decides whether it overflows, either is right.
        unsure = (size + error >= limit * (1 - half_ulp)) & (size - error <= limit * (1 + half_ulp))
        value = np.where(size > limit, np.sign(value) * np.inf, value)
        finite = np.isfinite(value)
        odd = ~finite & ~unsure
        np.testing.assert_array_equal(got[odd], value[odd])
        allowed = (
            error
            + half_ulp * (np.abs(value) + error)
            + SMALLEST[actual.dtype]
            + 2.0**-140  # products below the normal numbers of float32
        )
        wrong = finite & ~unsure & ~(np.abs(got - value) <= allowed)
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} differ, first at {np.argmax(wrong)}: "
        f"{got[wrong][0]!r} for {value[wrong][0]!r}, allowed {allowed[wrong][0]!r}"
    )
