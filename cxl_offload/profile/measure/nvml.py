"""How much memory GPUs have, from NVIDIA's management library, which is opened at run time.

It makes no CUDA context and wakes no GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence

LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0


class _Memory(ctypes.Structure):
    """``nvmlMemory_t``: bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def memory_bytes(pci_addresses: Sequence[str], *, library: str = LIBRARY) -> dict[str, int]:
    """Bytes of memory by PCI address, of those GPUs that the library knows.

    Parameters
    ----------
    pci_addresses
        Such as ``0000:3b:00.0``.
    library
        Its name or path; where it cannot be opened or started, nothing is known.
    """
    with contextlib.suppress(OSError, AttributeError):
        nvml = ctypes.CDLL(library)
        if nvml.nvmlInit_v2() == _SUCCESS:
            try:
                found = {address: _memory_of(nvml, address) for address in pci_addresses}
            finally:
                nvml.nvmlShutdown()
            return {address: total for address, total in found.items() if total}
    return {}


def _memory_of(nvml: ctypes.CDLL, address: str) -> int:
    """0 where the library does not say."""
    device, memory = ctypes.c_void_p(), _Memory()
    told = nvml.nvmlDeviceGetHandleByPciBusId_v2(address.encode(), ctypes.byref(device))
    if told == _SUCCESS:
        told = nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
    return int(memory.total) if told == _SUCCESS else 0
