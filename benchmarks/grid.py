"""The sizes at which benchmarks with ``--grid`` compare this package with stock."""

from __future__ import annotations

ROWS = (1, 4, 8, 32)
"""Of a batch: sequences that are decoded or trained on at once, or requests under way."""
LENGTHS = (32, 128, 512)
"""Tokens of a prompt, or of a sequence that is trained on."""

CELLS = {f"{rows} x {length}": (rows, length) for rows in ROWS for length in LENGTHS}

BAR = 0.98
"""Of stock's speed, in every cell."""
