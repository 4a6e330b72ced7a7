"""What FlexGen's modules see as ``torch.nn.functional``."""

from __future__ import annotations

from typing import Any

from torch.nn import functional

from cxl_offload.integrations.flexgen.request import FlexGenRun
from cxl_offload.ops.linear import SinglePrecisionLinear

__all__ = ["functional_of"]


class _SinglePrecision:
    """``torch.nn.functional`` with another ``linear``."""

    def __init__(self) -> None:
        self.linear = SinglePrecisionLinear()

    def __getattr__(self, name: str) -> Any:
        return getattr(functional, name)


def functional_of(run: FlexGenRun) -> Any:
    """The functions of a run."""
    if run.accelerator == "host" and run.cpu_linear == "single":
        return _SinglePrecision()
    return functional
