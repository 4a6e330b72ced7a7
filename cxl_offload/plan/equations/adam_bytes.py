"""Bytes of Adam in single precision: what the planner counts, and the profile measures."""

from __future__ import annotations

HOST_BYTES_PER_PARAM = 16
"""fp32 parameter, gradient, momentum and variance."""

OPTIMIZER_BYTES_PER_PARAM = 28
"""Memory traffic of one AdamW update in fp32: four values read, three written."""
