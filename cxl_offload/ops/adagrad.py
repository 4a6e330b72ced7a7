"""Adagrad on the CPU, in one pass over memory: 20 bytes a float32 parameter.

Source: Duchi, Hazan and Singer, *Adaptive Subgradient Methods for Online Learning and Stochastic
Optimization*; settings as in ``torch.optim.Adagrad``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from cxl_offload import _C
from cxl_offload.ops.optimizer import OnePassOptimizer
from cxl_offload.ops.state_options import StateOptions
from cxl_offload.renamed import renamed_keywords

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CPUAdagrad(OnePassOptimizer):
    """Adagrad for parameters in host memory; weight decay is added to the gradient (L2).

    ``state_dict`` has the names of ``torch.optim.Adagrad`` (``step``, ``sum``). Sparse gradients
    are refused. Parameters as in :class:`cxl_offload.ops.adam.CPUAdam` and ``torch.optim.Adagrad``.
    """

    rule_class = _C.AdagradRule
    state_names: ClassVar[tuple[str, ...]] = ("sum",)

    @renamed_keywords(placement="policy")
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        **states: Unpack[StateOptions],
    ) -> None:
        given = {"initial_accumulator_value": initial_accumulator_value}
        first = _C.number(given, "initial_accumulator_value")
        if not 0 <= first < math.inf:
            raise ValueError(
                f"initial_accumulator_value {first:g}; it must be finite and not negative"
            )
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "maximize": maximize,
        }
        super().__init__(params, defaults, **states)

    def _first_value(self, group: dict[str, Any], name: str) -> float:
        return _C.number(group, "initial_accumulator_value")
