"""The Grafana board as data: its panels, its queries, and what they name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BOARD = ROOT / "configs" / "grafana" / "dashboards" / "cxl_offload.json"
TARGET_LABELS = {"instance", "job"}
"""Given by Prometheus to everything that it scrapes."""

_METRIC = re.compile(r"\bcxl_offload_\w+")
_MATCHERS = re.compile(r"\{([^}]*)\}")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_LABEL_LIST = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_LEGEND = re.compile(r"\{\{\s*(\w+)\s*\}\}")


@dataclass(frozen=True)
class Query:
    """One query of a panel."""

    panel: str
    text: str
    legend: str = ""

    @property
    def metrics(self) -> set[str]:
        return set(_METRIC.findall(self.text))

    @property
    def labels(self) -> set[str]:
        """All labels that it selects, joins or shows by."""
        lists = [
            part.strip() for found in _LABEL_LIST.findall(self.text) for part in found.split(",")
        ]
        matched = [
            name for found in _MATCHERS.findall(self.text) for name in _MATCHER.findall(found)
        ]
        return {*filter(None, lists), *matched, *_LEGEND.findall(self.legend)}

    def filled(self, *, instance: str, rate_interval: str) -> str:
        """As Grafana sends it: its variables replaced by values."""
        text = self.text.replace("$__rate_interval", rate_interval).replace("$instance", instance)
        assert "$" not in text, text
        return text


def read_board() -> dict[str, Any]:
    board: dict[str, Any] = json.loads(BOARD.read_text(encoding="utf-8"))
    return board


def queries() -> Iterator[Query]:
    """Of every panel, in their order."""
    for panel in read_board()["panels"]:
        for target in panel.get("targets", ()):
            yield Query(panel["title"], target["expr"], target.get("legendFormat", ""))
