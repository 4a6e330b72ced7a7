"""Measuring: pinned threads over buffers whose pages were checked; nothing here is estimated."""

from cxl_offload.profile.measure.effort import FULL, QUICK, RATES, Effort
from cxl_offload.profile.measure.gpu import CudaGpus, GpuName, Gpus
from cxl_offload.profile.measure.probe import Allocator, Buffer
from cxl_offload.profile.measure.run import (
    FULL_SECONDS,
    QUICK_SECONDS,
    Measurement,
    measure_machine,
    quick,
)

__all__ = [
    "FULL",
    "FULL_SECONDS",
    "QUICK",
    "QUICK_SECONDS",
    "RATES",
    "Allocator",
    "Buffer",
    "CudaGpus",
    "Effort",
    "GpuName",
    "Gpus",
    "Measurement",
    "measure_machine",
    "quick",
]
