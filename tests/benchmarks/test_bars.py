"""Bars of benchmarks: which end of an interval judges, and what is printed."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import bench_transformers
from benchmarks.bars import Bar, print_bars
from benchmarks.measurements import Ratio


def test_a_bar_is_judged_by_the_lower_end_where_nothing_else_is_asked() -> None:
    ratio = Ratio(1.1, 0.97, 1.2)
    assert not Bar("a case", ratio, 0.98).met
    assert Bar("a case", ratio, 0.97).met
    assert Bar("a case", ratio, 1.1, "median").met
    assert not Bar("a case", ratio, 1.11, "median").met


def test_bars_are_printed_with_the_worst_first(capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = Bar("good", Ratio(2.0, 1.9, 2.1), 1.5), Bar("bad", Ratio(2.0, 1.0, 2.5), 1.5)
    assert print_bars([good])
    assert not print_bars([good, bad])
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines == [
        "| bad | 1.5 by the lower end | 2.00 [1.00, 2.50] | MISSED |",
        "| good | 1.5 by the lower end | 2.00 [1.90, 2.10] | met |",
    ]


def test_a_missed_bar_that_no_product_allows_says_so() -> None:
    ratio = Ratio(0.5, 0.4, 0.6)
    verdict = "| MISSED; reading and products alone allow 0.70 |"
    assert str(Bar("a", ratio, 0.85, most=0.7)).endswith(verdict)
    assert str(Bar("a", ratio, 0.85, most=0.9)).endswith("| MISSED |")
    assert str(Bar("a", ratio, 0.3, most=0.2)).endswith("| met |")


def test_without_bars_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_bars([])
    assert capsys.readouterr().out == ""


def row(prefill: list[float], decode: list[float]) -> dict[str, Any]:
    """32 rows of 512 tokens, every head with keys of its own."""
    found = {
        phase: dict(zip(("times_stock", "low", "high"), ratio, strict=True))
        for phase, ratio in (("prefill", prefill), ("decode", decode))
    }
    return {"kv_heads": 32, "batch": 32, "prompt": 512, **found}


def test_bars_of_transformers_are_judged_by_the_median() -> None:
    document: dict[str, Any] = {"rows": [row([0.82, 0.79, 1.16], [7.0, 6.9, 7.1])]}
    document["disk"] = [{"page_cache": False, "near_share": 0.0, "ratio": [3.1, 2.9, 3.2]}]
    document["llama"] = [{"prompt": 32, "weights": "bf16", "ratio": [0.89, 0.8, 0.95]}]
    bars = bench_transformers.bars(document, 32)
    assert {bar.by for bar in bars} == {"median"}
    assert [(bar.least, bar.met) for bar in bars] == [
        *((7.0, True), (1.0, False)),  # a prefill whose interval alone reaches stock is slower
        *((3.0, True), (0.9, False)),
    ]


def test_a_bar_of_one_sample_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    print_bars([Bar("often", Ratio(2.0, 1.9, 2.1), 1.5)])
    assert "measured once" not in capsys.readouterr().out
    print_bars([Bar("often", Ratio(2.0, 1.9, 2.1), 1.5), Bar("once", Ratio(2.0, 2.0, 2.0), 1.5)])
    assert capsys.readouterr().out.endswith("was measured once: its verdict says little.\n")
