"""The report of bench_flexgen.py: rates and ratios of a case, the table, and the falls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.measurements import Ratio, paired_ratio
from benchmarks.neighbour import QUIET, Falls, falls_of

STOCK, OURS = "stock", "cxl_offload"
PHASES = ("prefill", "decode")

Seconds = dict[str, dict[str, list[float]]]
"""Of a phase, by condition and side."""


def phase_result(seconds: Seconds, tokens: int) -> dict[str, Any]:
    """Medians and the ratio of a phase where nothing else runs, and what was measured."""
    quiet = seconds[QUIET]
    rates = {side: tokens / float(np.median(each)) for side, each in quiet.items()}
    return {
        "stock_tokens_per_s": rates[STOCK],
        "cxl_offload_tokens_per_s": rates[OURS],
        "ratio": asdict(paired_ratio(quiet[STOCK], quiet[OURS])),
        "seconds": seconds,
    }


def falls(results: Sequence[dict[str, Any]]) -> dict[str, Falls]:
    """Of every case and phase that was measured in both conditions."""
    found = {}
    for result in results:
        for phase in PHASES:
            if phase in result:
                seconds = result[phase]["seconds"]
                stock, ours = ({c: seconds[c][side] for c in seconds} for side in (STOCK, OURS))
                found[f"{result['case']}: {phase}"] = falls_of(stock, ours)
    return found


def show(console: Console, results: Sequence[dict[str, Any]]) -> None:
    """The table."""
    made = Table("case", "phase", title="FlexGen tokens/s (measured, host in place of a GPU)")
    for heading in ("stock", "this package", "ratio", "95 % interval", "tokens equal"):
        made.add_column(heading, justify="right")
    for result in results:
        phases = [phase for phase in PHASES if phase in result]
        for phase in phases:
            one, ratio = result[phase], Ratio(**result[phase]["ratio"])
            made.add_row(
                result["case"] if phase == phases[0] else "",
                phase,
                f"{one['stock_tokens_per_s']:.1f}",
                f"{one['cxl_offload_tokens_per_s']:.1f}",
                f"{ratio.median:.2f}",
                f"{ratio.low:.2f} to {ratio.high:.2f}",
                f"{result['equal_tokens']:.1%}" if phase == "decode" else "",
            )
    console.print(made)
