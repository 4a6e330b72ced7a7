"""The sizes at which benchmarks with ``--grid`` compare this package with stock."""

from __future__ import annotations

import argparse

ROWS = (1, 4, 8, 32)
"""Of a batch: sequences that are decoded or trained on at once, or requests under way."""
LENGTHS = (32, 128, 512)
"""Tokens of a prompt, or of a sequence that is trained on."""

CELLS = {f"{rows} x {length}": (rows, length) for rows in ROWS for length in LENGTHS}

BAR = 0.98
"""Of stock's speed, in every cell."""


def add_option(parser: argparse.ArgumentParser) -> None:
    """``--grid``, which is the same in every benchmark that has it."""
    told = " and ".join(", ".join(map(str, each)) for each in (ROWS, LENGTHS))
    parser.add_argument("--grid", action="store_true", help=f"rows and tokens: {told}")
