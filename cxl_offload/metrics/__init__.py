"""Metrics of a process for Prometheus and OpenTelemetry, and its events as lines of JSON.

One line turns them on: ``cxl_offload.metrics.serve(9400)``. Nothing is read until somebody asks,
and then in the thread of who asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxl_offload.lazy import lazy_names

if TYPE_CHECKING:
    from cxl_offload.metrics.endpoint import MetricsServer, serve
    from cxl_offload.metrics.event_log import EventLog, JsonLines, log_events
    from cxl_offload.metrics.opentelemetry import observe
    from cxl_offload.metrics.prometheus import PrometheusCollector
    from cxl_offload.metrics.reader import MetricsReader
    from cxl_offload.metrics.table import METRICS, Metric

__all__ = [
    "METRICS",
    "EventLog",
    "JsonLines",
    "Metric",
    "MetricsReader",
    "MetricsServer",
    "PrometheusCollector",
    "log_events",
    "observe",
    "serve",
]

__getattr__, __dir__ = lazy_names(__name__)
