"""Clipping by global norm one step late, so that updates need not wait for the last gradient.

``torch.nn.utils.clip_grad_norm_`` needs all gradients before it scales the first. Updates that
begin in the backward take the norm of the step before instead; a step that knows none waits and is
clipped by its own.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from cxl_offload.ops.view import local_tensor

NORM = "late_clip_norm"
"""Key in every group, and so in checkpoints: the global norm of the step before."""

_ROUNDING = 1e-6
"""Added to the norm, as ``torch.nn.utils.clip_grad_norm_`` does."""


class LateClip:
    """What gradients are multiplied by, from the norm of the step before.

    Parameters
    ----------
    max_norm
        Global L2 norm that gradients are scaled down to, above 0.
    """

    def __init__(self, max_norm: float) -> None:
        value = _number(max_norm)
        if value is None or not 0 < value < math.inf:
            raise ValueError(f"late_max_norm {_shown(max_norm)}: a number above 0 is needed")
        self.max_norm = value
        self._squares: dict[torch.Tensor, float] = {}

    def check(self, group: Mapping[str, Any]) -> None:
        """Raises ValueError for parameters of which this process holds a part only."""
        for param in group["params"]:
            if isinstance(param, torch.Tensor) and local_tensor(param) is not param:
                raise ValueError(
                    "late_max_norm: a distributed parameter; the norm of its gradient is that of "
                    "all ranks, which each would have to wait for"
                )

    def scale_before(self, groups: Sequence[Mapping[str, Any]]) -> float | None:
        """For gradients that arrive in the backward; None: the step before left no norm."""
        norm = groups[0].get(NORM) if groups else None
        return None if norm is None else self._scale(float(norm))

    def see(self, params: Iterable[torch.Tensor]) -> None:
        """Adds the gradients of these parameters to the norm of this step."""
        for param in params:
            if param.grad is not None and param.grad.layout is torch.strided:  # others are refused
                norm = torch.linalg.vector_norm(param.grad, dtype=torch.float32)
                self._squares[param] = float(norm) ** 2

    def scale_now(self, groups: Sequence[Mapping[str, Any]]) -> float:
        """For what the backward left to the step; all gradients were seen."""
        before = self.scale_before(groups)
        return self._scale(self._norm(groups)) if before is None else before

    def keep(self, groups: Sequence[dict[str, Any]]) -> None:
        """Ends a step: its norm is that of the step before from now on.

        A norm that is no number is not kept, and a step without gradients changes nothing.
        """
        if self._squares:
            norm = self._norm(groups)
            self._squares.clear()
            for group in groups:
                group[NORM] = norm if math.isfinite(norm) else None

    def _norm(self, groups: Sequence[Mapping[str, Any]]) -> float:
        """Of this step, summed in the order of the parameters: gradients arrive in any."""
        seen = self._squares
        order = [param for group in groups for param in group["params"] if param in seen]
        return math.sqrt(sum(seen[param] for param in order))

    def _scale(self, norm: float) -> float:
        return min(1.0, self.max_norm / (norm + _ROUNDING))


def check_norm(group: Mapping[str, Any]) -> None:
    """Raises ValueError where a group, as of a checkpoint, has a norm that no step can leave."""
    given = group.get(NORM)
    if given is None:  # it leaves the first step to its own
        return
    norm = _number(given)
    if norm is None or not 0 <= norm < math.inf:
        raise ValueError(
            f"{NORM} of a group is {_shown(given)}; it must be a norm, finite and not negative, or "
            "None, with which the next step takes its own"
        )


def _number(given: Any) -> float | None:
    """A number, also one in a tensor; None: it is none."""
    value = given
    if isinstance(given, torch.Tensor) and given.numel() == 1 and not given.is_meta:
        value = given.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _shown(given: Any) -> str:
    """In one short line."""
    return " ".join(repr(given).split())[:80]
