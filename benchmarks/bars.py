"""What is asked of a benchmark's ratios, and the verdicts that it ends with.

:data:`ASKED` has the bars of benchmarks whose rows (results.py) say all that a bar needs; others
make theirs themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.measurements import Ratio
from benchmarks.results import UNCOMPRESSED, Document, Row, rows_of

By = Literal["low", "median"]
_TOLD: dict[By, str] = {"low": "by the lower end", "median": "by the median"}


@dataclass(frozen=True, slots=True)
class Bar:
    """What is asked of a ratio.

    Attributes
    ----------
    asked
        Of what.
    ratio
        What was found.
    least
        What it has to reach; 1 asks for not slower.
    by
        What of the ratio has to reach it: the lower end of its 95 % interval, or its median.
    most
        As of :class:`~benchmarks.results.Row`.
    """

    asked: str
    ratio: Ratio
    least: float
    by: By = "low"
    most: float | None = None

    @property
    def judged(self) -> float:
        return self.ratio.low if self.by == "low" else self.ratio.median

    @property
    def has_no_interval(self) -> bool:
        """Chance cannot be seen in one sample."""
        return self.by == "low" and self.ratio.low == self.ratio.high

    @property
    def met(self) -> bool:
        return self.judged >= self.least

    def __str__(self) -> str:
        found = f"{self.ratio.median:.2f} [{self.ratio.low:.2f}, {self.ratio.high:.2f}]"
        verdict = "met" if self.met else "MISSED"
        if not self.met and self.most is not None and self.most < self.least:
            verdict += f"; reading and products alone allow {self.most:.2f}"
        return f"| {self.asked} | {self.least:g} {_TOLD[self.by]} | {found} | {verdict} |"


@dataclass(frozen=True, slots=True)
class Asked:
    """A bar of every row whose case and peer fit.

    Attributes
    ----------
    case, beside
        Patterns of the whole texts.
    least
        What the lower end of the row's interval has to reach.
    fastest
        Of the peers that fit, only the one that leaves this package the least is meant.
    """

    case: str
    beside: str
    least: float
    fastest: bool = False

    def rows(self, rows: Iterable[Row]) -> list[Row]:
        """Those that it is about."""
        found = [
            row
            for row in rows
            if re.fullmatch(self.case, row.case) and re.fullmatch(self.beside, row.beside)
        ]
        if not self.fastest:
            return found
        cases = dict.fromkeys(row.case for row in found)
        return [
            min((row for row in found if row.case == case), key=lambda row: row.ratio)
            for case in cases
        ]


_DEEPSPEED = "DeepSpeedCPUAdam(, huge pages)?"
_FLEXGEN_WAYS = (
    "(all on the host|half of weights and KV on the accelerator|"
    "attention on the CPU(, 2 batches)?)(, 8 x 128)?"
)
"""Cases of bench_flexgen.py at its own size, or at the same one of the grid."""

_ZERO_CASES = r"(placement.*|\d+ x \d+, .*: step(, beside a neighbour)?)"
"""Every part of bench_zero_offload.py's own size, and whole steps of the grid."""

ASKED: dict[str, tuple[Asked, ...]] = {
    "flexgen": (
        Asked(".*", "stock FlexGen", 0.98),
        Asked(f"{_FLEXGEN_WAYS}: decode", "stock FlexGen", 1.5),
        Asked("make demo's own: .*, 2 batches: decode", "stock FlexGen", 1.2),
        Asked(".*", "stock FlexGen's own fall", 0.95),
    ),
    "zero_offload": (
        Asked(_ZERO_CASES, "stock DeepSpeed", 0.98),
        Asked("placement, CPUAdam: optimizer", "stock DeepSpeed", 1.15),
        Asked(_ZERO_CASES, "stock DeepSpeed's own fall", 0.95),
    ),
    "adam": (
        Asked("fp32", "memory's bound", 0.95),
        Asked("bf16-fp32-states", "memory's bound", 0.93),
        Asked("all-bf16", "memory's bound", 0.85),
        Asked("all-bf16", "memory's bound", 0.90),
        Asked("fp32", "DeepSpeedCPUAdam", 1.15),
        Asked("bf16-fp32-states", "DeepSpeedCPUAdam", 1.25),
        Asked("all-bf16", _DEEPSPEED, 1.5, fastest=True),
        Asked("fp32(, a model's .*)?", f"{_DEEPSPEED}|torch AdamW fused", 0.99, fastest=True),
    ),
    "shared_cpus": (
        Asked(".*", "spinning", 0.98),
        Asked(".*, beside a neighbour", "spinning", 1.0),
    ),
    "states": (
        Asked("8 bit", "memory's bound", 0.85),
        Asked("8 bit", "DeepSpeedCPUAdam, fp32(, huge pages)?", 1.4),
        Asked("8 bit", "(torchao|bitsandbytes) AdamW8bit(, huge pages)?", 1.3),
    ),
    "attention": (
        Asked(r"(bf16|fp16): this, (\(b, h, s, d\)|FlexGen's layout)", "read bound", 0.9),
        Asked("fp16: this, 4-bit(, FlexGen's layout)?", UNCOMPRESSED, 2.3),
        Asked(".*", "vLLM", 1.0),
    ),
    "linear": (
        Asked("(fp16|bf16|fp32|fp8|int8), [1-8] rows", "read bound", 0.85),
        Asked("int4, [1-8] rows", "read bound", 0.6),
        Asked("fp16, (8|32) rows", "torch", 3.0),
        Asked("bf16, (8|32) rows", "torch", 1.3),
    ),
    # 2 % over the placement; beside less than a few GiB, what Python itself allocates is more.
    "large_checkpoint": (Asked("8 GiB, 6 GiB of .*", "the placement's bound", 1 / 1.02),),
}
"""Benchmark to what its rows are asked."""


def bars_of(benchmark: str, document: Document) -> Iterator[Bar]:
    """The bars of a benchmark's JSON: of the rows that it has, and of no others."""
    rows = rows_of(benchmark, document)
    for asked in ASKED[benchmark]:
        for row in asked.rows(rows):
            low, high = (row.ratio if end is None else end for end in (row.low, row.high))
            peer = f"the fastest peer, {row.beside}" if asked.fastest else row.beside
            found = Ratio(row.ratio, low, high)
            yield Bar(f"{row.case}, beside {peer}", found, asked.least, most=row.most)


def print_bars(bars: Sequence[Bar]) -> bool:
    """A row for each, what is farthest below its bar first; whether all are met."""
    if bars:
        print("\n| bar | at least | found | |\n|---|---|---|---|")
    for bar in sorted(bars, key=lambda bar: bar.judged / bar.least):
        print(bar)
    if any(bar.has_no_interval for bar in bars):
        print("\nA row whose interval is one number was measured once: its verdict says little.")
    return all(bar.met for bar in bars)
