"""Lion on the CPU, in one pass over memory: 20 bytes a float32 parameter.

Source: Chen et al., *Symbolic Discovery of Optimization Algorithms*, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from cxl_offload import _C
from cxl_offload.ops.optimizer import OnePassOptimizer
from cxl_offload.ops.state_codes import Code
from cxl_offload.ops.state_options import StateOptions
from cxl_offload.renamed import renamed_keywords

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CPULion(OnePassOptimizer):
    """Lion for parameters in host memory; weight decay is decoupled.

    A gradient that is not a number makes the parameter one that is not, rather than leaving it as
    it is. Parameters as in :class:`cxl_offload.ops.adam.CPUAdam`.
    """

    rule_class = _C.LionRule
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg",)
    codes: ClassVar[Mapping[str, Code]] = {"exp_avg": "signed"}
    counts_steps: ClassVar[bool] = False

    @renamed_keywords(placement="policy")
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **states: Unpack[StateOptions],
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize},
            **states,
        )
