"""The same numbers through OpenTelemetry's API, collected by its SDK."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import cxl_offload
from cxl_offload import ConfigError, Session
from cxl_offload.metrics import METRICS, observe


def test_instruments_say_what_the_session_holds(session: Session) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    reader = export.InMemoryMetricReader()
    observe(sdk.MeterProvider(metric_readers=[reader]), session=session)
    kept = cxl_offload.zeros(2 << 20, dtype=torch.uint8, policy="cxl")
    data: Any = reader.get_metrics_data()
    found = {
        metric.name: metric
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert set(found) <= {metric.otel_name for metric in METRICS}
    held = found["cxl_offload.node.held"]
    assert held.unit == "By"
    points = {tuple(sorted(p.attributes.items())): p.value for p in held.data.data_points}
    assert points[("node", "2"), ("tier", "cxl")] == session.stats().nodes[2].current_bytes
    counter = found["cxl_offload.pool.allocations"].data
    assert (counter.is_monotonic, counter.data_points[0].value) == (True, 1)
    del kept


def test_missing_api_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match="not installed; pip install opentelemetry-api"):
        observe()
