"""``CPUAdam(overlap=True)`` under ZeRO-Offload: updates begin while the backward goes on.

In stages 1 and 2 the masters of a group are one flat tensor on the host, and DeepSpeed copies each
parameter's gradient into its part of another when it is final. What has been copied is updated on a
thread of the optimizer's; DeepSpeed's step updates what is left. The bits are those of one step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from deepspeed.accelerator import get_accelerator

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.deepspeed import objects
from cxl_offload.ops.optimizer import OnePassOptimizer
from cxl_offload.ops.overlap import EarlyUpdates

_COPIES = "async_inplace_copy_grad_to_fp32_buffer_from_gpu"
_USED = (_COPIES, "grad_position", "get_param_id", "single_partition_of_fp32_groups", "clip_grad")


class EarlySteps:
    """Follows the gradients of one ZeRO optimizer of stage 1 or 2 until :meth:`remove`.

    Raises
    ------
    ConfigError
        Its settings need all gradients before the first update; names them all.
    """

    def __init__(self, zero: Any, early: EarlyUpdates) -> None:
        why = _why_not(zero)
        if why is not None:
            raise ConfigError(
                f"{type(zero.optimizer).__name__}(overlap=True) under DeepSpeed: {why}, or leave "
                "overlap out"
            )
        self._zero = ref(zero)
        self._early = early
        self._copies: Callable[..., object] = getattr(type(zero), _COPIES)
        setattr(zero, _COPIES, self._copied)

    def remove(self) -> None:
        """Gradients are left to the step from now on."""
        zero = self._zero()
        if zero is not None:
            vars(zero).pop(_COPIES, None)

    def wait(self) -> None:
        """Returns when no part is being updated; what failed is raised by the step."""
        self._early.wait_quietly()

    @torch.no_grad()
    def _copied(self, param: torch.Tensor) -> None:
        zero: Any = self._zero()
        self._copies(zero, param)
        group, _, begin, count = zero.grad_position[zero.get_param_id(param)]
        master = zero.single_partition_of_fp32_groups[group]
        event = zero._pending_offload_events.get(get_accelerator().current_stream())
        ready = _at_once if event is None else event.synchronize
        self._early.part_arrived(master, begin, begin + count, ready=ready)


def follow_gradients(zero: Any) -> EarlySteps | None:
    """Where the optimizer is one of this package's with ``overlap=True``; else None."""
    inner = objects.inner_optimizer(zero)
    if not isinstance(inner, OnePassOptimizer) or inner.early_updates is None:
        return None
    return EarlySteps(zero, inner.early_updates)


def _at_once() -> None:
    """On a CPU the copy is there when the call returns."""


def _why_not(zero: Any) -> str | None:
    """What keeps the updates from beginning early, and what to do about it."""
    if objects.is_stage3(zero):
        return "stage 3 hands sub-groups to its step one by one; use stage 2"
    if any(not hasattr(zero, name) for name in (*_USED, "_pending_offload_events")):
        return "this version of DeepSpeed copies gradients in another way; use 0.19.8"
    inner = zero.optimizer
    clips = (
        f"gradients are clipped to a norm of {float(zero.clip_grad or 0):g}, for which all of them "
        "have to be there (1 where the configuration says nothing); give gradient_clipping and "
        "set it to 0"
    )
    reasons = {
        clips: zero.clip_grad > 0,
        "late_max_norm knows this rank's part of the gradients only; leave it out": (
            inner.late_max_norm is not None
        ),
        "a step of fp16 may be skipped for its loss scale; use bf16": (
            zero.dtype is not torch.bfloat16 or float(zero.loss_scale) != 1.0
        ),
        "check_grad_overflow may skip a step; set it to false": bool(zero.check_grad_overflow),
        "states in 8 bits, or rounded at random, are updated as a whole; use float32 states": (
            inner.in_codes or inner.state_dtype is not torch.float32
        ),
        "ZenFlow has updates of its own; turn it off": bool(getattr(zero, "zenflow", False)),
    }
    return "; ".join(why for why, holds in reasons.items() if holds) or None
