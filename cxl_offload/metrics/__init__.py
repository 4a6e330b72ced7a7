"""Metrics of a process for Prometheus and OpenTelemetry, and its events as lines of JSON.

One line turns them on: ``cxl_offload.metrics.serve(9400)``. Nothing is read until somebody asks,
and then in the thread of who asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxl_offload.lazy import lazy_names

if TYPE_CHECKING:
    from cxl_offload.metrics.endpoint import MetricsServer as MetricsServer
    from cxl_offload.metrics.endpoint import serve as serve
    from cxl_offload.metrics.event_log import EventLog as EventLog
    from cxl_offload.metrics.event_log import JsonLines as JsonLines
    from cxl_offload.metrics.event_log import log_events as log_events
    from cxl_offload.metrics.opentelemetry import observe as observe
    from cxl_offload.metrics.prometheus import PrometheusCollector as PrometheusCollector
    from cxl_offload.metrics.reader import MetricsReader as MetricsReader
    from cxl_offload.metrics.table import METRICS as METRICS
    from cxl_offload.metrics.table import Metric as Metric

__getattr__, __dir__ = lazy_names(__name__)
