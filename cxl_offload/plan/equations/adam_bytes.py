"""Bytes of Adam in single precision: what the planner counts, and the profile measures."""

from __future__ import annotations

from cxl_offload.core import STATE_BLOCK

HOST_BYTES_PER_PARAM = 16
"""fp32 parameter, gradient, momentum and variance."""

OPTIMIZER_BYTES_PER_PARAM = 28
"""Memory traffic of one AdamW update in fp32: four values read, three written."""

STATE_TYPES = ("bfloat16", "uint8")
"""What this package's CPUAdam keeps momentum and variance as beside float32, by torch's names. Both
lose precision."""


def moment_bytes(params: int, dtype: str = "") -> int:
    """Bytes of the momentum, or of the variance, of so many parameters; no name: float32."""
    if dtype == "uint8":
        return params + -(-params // STATE_BLOCK)
    return params * (2 if dtype == "bfloat16" else 4)
