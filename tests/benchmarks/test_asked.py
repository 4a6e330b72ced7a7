"""Which rows of a benchmark have a bar, and that a benchmark ends with 1 where one is missed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    bars,
    bench_adam,
    bench_attention,
    bench_flexgen,
    bench_linear,
    bench_states,
)
from benchmarks.bars import ASKED, Asked, bars_of
from benchmarks.results import UNCOMPRESSED, Row, rows_of
from benchmarks.zero_report import OURS, PARTS, STOCK

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "performance.json"
RATIO = {"median": 1.0, "low": 0.9, "high": 1.1}


def asked(benchmark: str, document: Any) -> dict[str, tuple[float, bool]]:
    return {bar.asked: (bar.least, bar.met) for bar in bars_of(benchmark, document)}


def four_bits(dtype: str, low: float) -> Any:
    """The part of attention's JSON that says how much faster 4-bit caches are."""
    ratio = {"of_bound": RATIO, "over_ours": RATIO | {"low": low, "median": 2.5}}
    names = ("this, 4-bit", "this, 4-bit, FlexGen's layout", "this, e4m3")
    return {"cases": {dtype: dict.fromkeys(names, ratio)}}


def test_four_bits_are_asked_beside_float16_in_both_layouts() -> None:
    met, missed = (asked("attention", four_bits("fp16", low)) for low in (2.3, 2.29))
    cases = [f"fp16: this, 4-bit{layout}" for layout in ("", ", FlexGen's layout")]
    assert met == {f"{case}, beside {UNCOMPRESSED}": (2.3, True) for case in cases}
    assert missed == {f"{case}, beside {UNCOMPRESSED}": (2.3, False) for case in cases}
    assert asked("attention", four_bits("bf16", 1.0)) == {}


def test_attention_is_asked_beside_the_bound_and_vllm() -> None:
    cases = {
        bench_attention.OURS: {"of_bound": RATIO},
        bench_attention.OURS_FLEXGEN: {"of_bound": RATIO | {"low": 0.89}},
        "vLLM": {"ours_over_it": RATIO | {"low": 0.99}},
        "torch SDPA": {"ours_over_it": RATIO},
    }
    assert asked("attention", {"cases": {"bf16": cases}}) == {
        "bf16: this, (b, h, s, d), beside read bound": (0.9, True),
        "bf16: this, FlexGen's layout, beside read bound": (0.9, False),
        "bf16, beside vLLM": (1.0, False),
    }


def test_linear_layers_are_asked_beside_the_bound_and_torch() -> None:
    rows = [("fp16", 8), ("bf16", 32), ("fp32", 8), ("int8", 2), ("int4", 1), ("int4", 32)]
    torch_ratio = {"fp16": 3.0, "bf16": 1.29, "fp32": 0.5}
    cases = [
        {"weights": name, "rows": count, "of_bound": RATIO | {"low": 0.6}, "of_roofline": RATIO}
        | ({"over_torch": RATIO | {"low": torch_ratio[name]}} if name in torch_ratio else {})
        for name, count in rows
    ]
    assert asked("linear", {"cases": cases}) == {
        "fp16, 8 rows, beside read bound": (0.85, False),
        "fp32, 8 rows, beside read bound": (0.85, False),
        "int8, 2 rows, beside read bound": (0.85, False),
        "int4, 1 rows, beside read bound": (0.6, True),
        "fp16, 8 rows, beside torch": (3.0, True),
        "bf16, 32 rows, beside torch": (1.3, False),
    }


def test_states_are_asked_beside_the_bound_and_every_peer() -> None:
    ratio = [1.5, 1.35, 1.6]
    document: dict[str, Any] = {"of_bound": [0.9, 0.84, 1.0]}
    document |= {"times_as_fast": dict.fromkeys(("bound, 8 bit", *bench_states.CONTENDERS), ratio)}
    expected = {"8 bit, beside memory's bound": (0.85, False)}
    for pages in ("", ", huge pages"):
        expected[f"8 bit, beside DeepSpeedCPUAdam, fp32{pages}"] = (1.4, False)
        expected[f"8 bit, beside torchao AdamW8bit{pages}"] = (1.3, True)
        expected[f"8 bit, beside bitsandbytes AdamW8bit{pages}"] = (1.3, True)
    assert asked("states", document) == expected


def test_adam_is_asked_beside_the_better_of_deepspeed_and_torch() -> None:
    fields = ("speedup", "speedup_low", "speedup_high")

    def document(*found: tuple[str, float, float]) -> Any:
        rows = [
            {"name": name, **dict(zip(fields, (median, low, 9.0), strict=True))}
            for name, median, low in found
        ]
        return {"cases": {"fp32": rows}}

    slow = ("DeepSpeedCPUAdam", 1.3, 1.2)
    huge, fused = "DeepSpeedCPUAdam, huge pages", "torch AdamW fused"
    told = asked("adam", document(slow, (huge, 1.1, 0.99), (fused, 1.2, 0.5)))
    assert told == {
        "fp32, beside DeepSpeedCPUAdam": (1.15, True),
        f"fp32, beside the fastest peer, {huge}": (0.99, True),
    }
    told = asked("adam", document(slow, (huge, 1.1, 1.05), (fused, 1.0, 0.98)))
    assert told[f"fp32, beside the fastest peer, {fused}"] == (0.99, False)


def test_a_model_is_asked_beside_its_fastest_peer_only() -> None:
    ratios = {"torch AdamW fused": [1.2, 1.1, 1.3], "DeepSpeedCPUAdam": [1.0, 0.98, 1.1]}
    document = {"cases": {}, "models": {"small": {"tensors": 52, "times_as_fast": ratios}}}
    case = "fp32, a model's 52 tensors (small)"
    assert asked("adam", document) == {
        f"{case}, beside the fastest peer, DeepSpeedCPUAdam": (0.99, False)
    }


def flexgen(*cases: str, low: float, beside: float | None = None) -> Any:
    """The JSON of bench_flexgen: as fast in both phases, and beside a neighbour where asked."""
    phase = {"ratio": RATIO | {"low": low}}
    document: dict[str, Any] = {
        "results": [{"case": case, "prefill": phase, "decode": phase} for case in cases]
    }
    if beside is not None:
        found = {"beside": RATIO | {"low": low}, "falls": RATIO | {"low": beside}}
        document["neighbour"] = {"cases": {f"{case}: decode": found for case in cases}}
    return document


def test_flexgen_is_asked_in_every_phase_and_size_and_more_of_the_decoding_at_8_x_128() -> None:
    stock = "beside stock FlexGen"
    own = "all on the host"
    told = asked("flexgen", flexgen(own, f"{own}, 8 x 128", f"{own}, 32 x 128", low=1.4))
    bars_of_8 = {f"{own}{size}: decode, {stock}": (1.5, False) for size in ("", ", 8 x 128")}
    assert told == bars_of_8 | {
        f"{own}: prefill, {stock}": (0.98, True),
        f"{own}, 8 x 128: prefill, {stock}": (0.98, True),
        f"{own}, 32 x 128: prefill, {stock}": (0.98, True),
        f"{own}, 32 x 128: decode, {stock}": (0.98, True),
    }


def test_ways_that_are_asked_for_more_are_those_of_the_benchmark() -> None:
    names = [*bench_flexgen.WAYS]
    document = flexgen(*names, *bench_flexgen.CASES.keys() - names, low=2.0)
    least = [bar.least for bar in bars_of("flexgen", document)]
    assert least.count(1.5) == len(names)
    assert least.count(1.2) == 1
    assert least.count(0.98) == 2 * len(bench_flexgen.CASES)
    grid = [bar.least for bar in bars_of("flexgen", flexgen(*bench_flexgen.GRID, low=2.0))]
    assert grid.count(1.5) == len(names)


def test_flexgen_beside_a_neighbour_is_asked_beside_stock_and_stocks_fall() -> None:
    case = "all on the host, 1 x 32: decode, beside a neighbour, beside stock FlexGen"
    for fall, met in ((0.94, False), (0.95, True)):
        told = asked("flexgen", flexgen("all on the host, 1 x 32", low=0.97, beside=fall))
        assert told[case] == (0.98, False)
        assert told[f"{case}'s own fall"] == (0.95, met)


def zero(table: dict[str, float]) -> Any:
    """What bench_zero_offload says of contenders, in every part of a step."""
    parts = {name: dict.fromkeys(PARTS, RATIO | {"low": low}) for name, low in table.items()}
    return {"speedup": parts}


def test_deepspeed_is_asked_in_every_part_of_a_step_and_more_of_the_optimizer() -> None:
    told = asked("zero_offload", zero({STOCK: 1.0, "placement": 0.97, OURS: 1.1}))
    expected = {f"placement: {part}": (0.98, False) for part in PARTS}
    expected |= {f"{OURS}: {part}": (0.98, True) for part in PARTS[1:]}
    expected[f"{OURS}: optimizer"] = (1.15, False)
    assert told == {f"{case}, beside stock DeepSpeed": bar for case, bar in expected.items()}


def test_a_size_of_deepspeeds_grid_is_asked_for_its_whole_step() -> None:
    found = {"beside": RATIO, "falls": RATIO | {"low": 0.94}}
    document = {"grid": {"1 x 32": zero({STOCK: 1.0, OURS: 0.97})}}
    document["neighbour"] = {
        "cases": {f"1 x 32, {OURS}: {part}": found for part in ("optimizer", "step")}
    }
    case = f"1 x 32, {OURS}: step"
    assert asked("zero_offload", document) == {
        f"{case}, beside stock DeepSpeed": (0.98, False),
        f"{case}, beside a neighbour, beside stock DeepSpeed": (0.98, False),
        f"{case}, beside a neighbour, beside stock DeepSpeed's own fall": (0.95, False),
    }


def test_a_bar_of_the_fastest_peer_is_about_every_case() -> None:
    rows = [Row("a", f"case {at}", f"peer {at}", ratio, ratio) for at, ratio in enumerate((2, 3))]
    rows.append(Row("a", "case 1", "peer 2", 1, 1))
    assert Asked("case .", "peer .", 1.0, fastest=True).rows(rows) == [rows[0], rows[2]]
    assert Asked("case .", "peer .", 1.0).rows(rows) == rows


def test_every_bar_fits_a_row_of_the_last_run_or_of_the_peers_that_it_lacked() -> None:
    runs = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]
    rows = [Row(**row) for run in runs for row in run["rows"]]
    rows += rows_of("attention", four_bits("fp16", 1.0))
    ratios = dict.fromkeys(bench_states.CONTENDERS, (1, 1, 1))
    rows += rows_of("states", {"of_bound": (1, 1, 1), "times_as_fast": ratios})
    rows.append(Row("attention", "bf16", "vLLM", 1.0))
    rows += rows_of("flexgen", flexgen(*bench_flexgen.CASES, low=1.0, beside=1.0))
    falls = {"neighbour": {"cases": {f"{OURS}: step": {"beside": RATIO, "falls": RATIO}}}}
    rows += rows_of("zero_offload", zero({OURS: 1.0}) | falls)
    large = {"options": {"gib": "8.0"}, "near_limit_bytes": 6 << 30}
    rows += rows_of("large_checkpoint", large | {"ours": {"peak_over_placed": 1.0}})
    cases = ("generate()", "generate(), beside a neighbour")
    shared = [{"case": case, "over_spinning": {"share_cpus()": RATIO}} for case in cases]
    rows += rows_of("shared_cpus", {"results": shared})
    for benchmark, bars_asked in ASKED.items():
        of_it = [row for row in rows if row.benchmark == benchmark]
        for each in bars_asked:
            assert each.rows(of_it), f"{benchmark}: {each} is about no row"


SMALL: dict[str, tuple[Any, list[str]]] = {
    "linear": (
        bench_linear,
        [
            *("--width=128", "--outputs=64", "--rows=1", "--sample-bytes=65536"),
            *("--weights", "fp16", "int4"),
        ],
    ),
    "attention": (
        bench_attention,
        ["--batch", "1", "--heads", "2", "--seq", "40", "--dim", "64", "--dtypes", "fp16"],
    ),
    "states": (bench_states, ["--numel", "8192", "--tries", "1"]),
    "adam": (
        bench_adam,
        ["--numel", "8192", "--tries", "1", "--cases", "fp32", "--models", "small"],
    ),
}
"""Of a run of a moment."""


@pytest.fixture
def few_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("few_threads")
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_prints_its_bars_and_ends_with_its_verdict(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, options = SMALL[name]
    own = {label: make for label, make in bench_states.CONTENDERS.items() if "cxl" in label}
    monkeypatch.setattr(bench_states, "CONTENDERS", own)
    monkeypatch.setattr(bench_adam, "has_deepspeed", lambda: False)
    monkeypatch.setattr(bench_linear, "LEAST_BYTES", 0)
    monkeypatch.setattr(bench_linear, "ring_bytes", lambda: 0)
    options = [*options, "--rounds", "2", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", [f"bench_{name}", *options])
    for least, verdict, status in ((1e-9, "met", 0), (99999.0, "MISSED", 1)):
        monkeypatch.setitem(bars.ASKED, name, (Asked(".*", ".*bound", least),))
        assert module.main() == status
        told = capsys.readouterr().out
        assert re.search(
            rf"beside .*bound \| {least:g} by the lower end .* \| {verdict}[;|\s]", told
        )
