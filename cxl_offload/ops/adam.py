"""Adam and AdamW on the CPU, in one pass over memory.

Every parameter, gradient and state is read once and written at most once, whatever the types, so a
step takes what its bytes take: 28 a float32 parameter (16 read, 12 written). Arithmetic is float32
with fused multiply-add; the bits do not depend on threads or instruction set.

Source: Kingma and Ba, *Adam: A Method for Stochastic Optimization*, algorithm 1; Loshchilov and
Hutter, *Decoupled Weight Decay Regularization*, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from cxl_offload import _C
from cxl_offload.ops.optimizer import OnePassOptimizer
from cxl_offload.ops.state_codes import Code
from cxl_offload.ops.state_options import StateOptions
from cxl_offload.ops.threads import Threads
from cxl_offload.ops.update import ParamUpdate, run
from cxl_offload.ops.view import untraced
from cxl_offload.renamed import renamed_keywords

if TYPE_CHECKING:
    from typing_extensions import Unpack


# Many parameters: four tensors, and the settings of torch.optim by their names there.
@untraced
def adam_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    adamw: bool = True,
    bias_correction: bool = True,
    grad_scale: float = 1.0,
    low_precision_copy: torch.Tensor | None = None,
    threads: Threads = None,
    isa: str | None = None,
) -> None:
    """One step of Adam or AdamW on one parameter, in place.

    Parameters
    ----------
    param, grad
        float32, bfloat16 or float16, of one shape, contiguous, on the CPU. Each may have its own
        type. ``grad`` is not changed.
    exp_avg, exp_avg_sq
        First and second moment, both float32 or both bfloat16, of the same shape. float16 is
        refused: squares of gradients leave its range.
    step
        The number of this step, from 1.
    adamw
        Whether weight decay is decoupled (AdamW) or added to the gradient (Adam, L2).
    grad_scale
        Multiplies the gradient before anything else: the inverse of the loss scale times the clip
        coefficient.
    low_precision_copy
        bfloat16 or float16, beside a float32 ``param``: receives the new parameters in the same
        pass.
    threads, isa
        See :func:`cxl_offload.ops.update.run`.

    Raises
    ------
    TypeError, ValueError
        A tensor is not contiguous, on another device, of another type or size, or overlaps with
        another that is written; a setting is outside of its range. Nothing has been written.
    """
    settings = {
        "lr": lr,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        "decoupled_weight_decay": adamw,
        "bias_correction": bias_correction,
    }
    rule = _C.AdamRule(settings, step, grad_scale)
    states = [("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)]
    run([ParamUpdate(rule, param, grad, states, low_precision_copy)], threads=threads, isa=isa)


class CPUAdam(OnePassOptimizer):
    """Adam and AdamW for parameters in host memory.

    Works wherever a ``torch.optim.Optimizer`` does. ``state_dict`` has the names of
    ``torch.optim.AdamW`` (``step``, ``exp_avg``, ``exp_avg_sq``) and loads its checkpoints and
    those of DeepSpeedCPUAdam. As DeepSpeed's client optimizer it needs
    ``"zero_allow_untested_optimizer": true`` and ``"zero_force_ds_cpu_optimizer": false``; see
    docs/adam.md.

    Parameters
    ----------
    params
        Parameters or groups, as in ``torch.optim``.
    lr, betas, eps, weight_decay
        As in ``torch.optim.AdamW``; no weight decay unless given.
    adamw
        False for Adam with weight decay in the gradient (L2).
    maximize
        Whether to go up the gradient, as in ``torch.optim.AdamW``.
    **states
        Where and how the states live, see
        :class:`~cxl_offload.ops.state_options.StateOptions`: ``state_dtype``, ``rounding_seed``,
        ``policy``, ``pages``, ``session``, ``threads``, ``overlap``, ``late_max_norm``.

    Raises
    ------
    TypeError, ValueError
        A setting that is missing, of another type, outside of its range or beyond float32;
        ``amsgrad`` or ``differentiable`` in a group, which this class does not have. A group is
        looked at again in every step. ``foreach``, ``fused`` and ``capturable``, which say how
        torch computes, change nothing.
    """

    rule_class = _C.AdamRule
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    codes: ClassVar[Mapping[str, Code]] = {"exp_avg": "signed", "exp_avg_sq": "root"}
    option_settings: ClassVar[Mapping[str, str]] = {"adamw": "decoupled_weight_decay"}

    @renamed_keywords(placement="policy")
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adamw: bool = True,
        bias_correction: bool = True,
        maximize: bool = False,
        **states: Unpack[StateOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": adamw,
            "bias_correction": bias_correction,
            "maximize": maximize,
        }
        super().__init__(params, defaults, **states)
