"""What FlexGen's modules see as ``torch.nn.functional``."""

from __future__ import annotations

from typing import Any

from torch.nn import functional

from cxl_offload.integrations.flexgen.request import FlexGenRun
from cxl_offload.ops.linear import SinglePrecisionLinear
from cxl_offload.ops.measured_linear import KernelLinear, MeasuredLinear

_LINEAR = {"fastest": MeasuredLinear, "kernel": KernelLinear, "single": SinglePrecisionLinear}
"""By ``cpu_linear``."""


class _WithLinear:
    """``torch.nn.functional`` with another ``linear``."""

    def __init__(self, linear: Any) -> None:
        self.linear = linear

    def __getattr__(self, name: str) -> Any:
        return getattr(functional, name)


def functional_of(run: FlexGenRun) -> Any:
    """The functions of a run."""
    if run.accelerator != "host" or run.cpu_linear == "half":
        return functional
    return _WithLinear(_LINEAR[run.cpu_linear]())
