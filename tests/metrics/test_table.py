"""The table of metrics: conventions of Prometheus, and those who show it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from cxl_offload.metrics.table import METRICS, markdown_table

ROOT = Path(__file__).resolve().parents[2]
BOARD = ROOT / "configs" / "grafana" / "dashboards" / "cxl_offload.json"


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
    assert markdown_table() in text, f"docs/metrics.md should have:\n{markdown_table()}"


def expressions() -> list[str]:
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())] + [
        variable["query"]["query"] if isinstance(variable["query"], dict) else variable["query"]
        for variable in board["templating"]["list"]
        if variable["type"] == "query"
    ]


def test_every_expression_of_the_board_names_metrics_that_exist() -> None:
    known = {metric.prometheus_name: set(metric.labels) for metric in METRICS}
    assert len(expressions()) > 8
    for text in expressions():
        named = re.findall(r"cxl_offload_\w+", text)
        assert named, text
        assert set(named) <= set(known), text
        allowed = set().union(*(known[name] for name in named)) | {"instance", "job"}
        for labels in re.findall(r"by \(([^)]*)\)", text):
            assert {each.strip() for each in labels.split(",")} <= allowed, text


def test_board_can_be_provisioned() -> None:
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    assert board["title"]
    assert board["uid"]
    assert board["id"] is None  # Grafana gives it
    assert "__inputs" not in board  # asked for by hand, which provisioning cannot
    places = [tuple(panel["gridPos"][key] for key in "xywh") for panel in board["panels"]]
    assert len({panel["id"] for panel in board["panels"]}) == len(places)
    for x, y, w, h in places:
        assert x >= 0
        assert x + w <= 24
        for other in places:
            if other != (x, y, w, h):
                apart = other[0] >= x + w or x >= other[0] + other[2]
                assert apart or other[1] >= y + h or y >= other[1] + other[3]
    folder = BOARD.parents[1] / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    uids = {panel["datasource"]["uid"] for panel in board["panels"] if "datasource" in panel}
    assert uids == {"${source}"}
    (provider,) = yaml.safe_load((folder / "dashboards.yaml").read_text())["providers"]
    assert provider["type"] == "file"
