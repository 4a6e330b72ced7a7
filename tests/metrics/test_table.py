"""The table of metrics: conventions of Prometheus, and the page that shows it."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.markdown_tables import markdown_table
from cxl_offload.metrics.table import METRICS

ROOT = Path(__file__).resolve().parents[2]


def test_names_follow_the_conventions_of_prometheus() -> None:
    names = [metric.prometheus_name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        name = metric.prometheus_name
        assert re.fullmatch(r"cxl_offload(_[a-z]+)+", name)
        assert name.endswith("_total") == (metric.kind == "counter")
        assert metric.unit == "" or f"_{metric.unit}" in name
        assert not re.search(r"_(kib|mib|gib|ms|us|count|sum|bucket)(_|$)", name)
        assert metric.text[0].isupper() or metric.text[0].isdigit()
        assert metric.text.endswith(".")
        assert all(re.fullmatch("[a-z]+", label) for label in metric.labels)


def test_names_of_opentelemetry_become_those_of_prometheus() -> None:
    """By the rules of its exporter: dots to underscores, the unit in words, ``_total`` last."""
    for metric in METRICS:
        unit = {"By": "_bytes", "": ""}[metric.otel_unit]
        total = "_total" if metric.kind == "counter" else ""
        made = metric.otel_name.replace(".", "_") + unit + total
        assert made == metric.prometheus_name


def test_page_of_the_documentation_shows_the_table() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = [
        (f"`{each.prometheus_name}`", each.kind, ", ".join(each.labels) or "-", each.text)
        for each in METRICS
    ]
    table = markdown_table(("metric", "type", "labels", "meaning"), rows)
    assert table in text, f"docs/metrics.md should have:\n{table}"
