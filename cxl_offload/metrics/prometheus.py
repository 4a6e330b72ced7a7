"""Metrics for Prometheus: a collector for any registry of ``prometheus_client``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cxl_offload.errors import ConfigError
from cxl_offload.memory import Session
from cxl_offload.metrics.reader import MetricsReader
from cxl_offload.metrics.table import METRICS
from cxl_offload.renamed import old_names

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family


class PrometheusCollector:
    """All metrics of this process, for a registry of ``prometheus_client``.

    ``prometheus_client.REGISTRY.register(cxl_offload.metrics.PrometheusCollector())`` adds them to
    an endpoint that a program has already. In a forked child there is nothing to collect.

    Parameters
    ----------
    session
        Whose memory is shown; None means the one in use.
    """

    def __init__(self, session: Session | None = None) -> None:
        prometheus_client()
        self._reader = MetricsReader(session)

    def describe(self) -> list[Family]:
        """Nothing, so that registering it reads nothing."""
        return []

    def collect(self) -> Iterator[Family]:
        """Called by the registry for every scrape."""
        core = prometheus_client().metrics_core
        families = {"gauge": core.GaugeMetricFamily, "counter": core.CounterMetricFamily}
        samples = self._reader.read()
        for metric in METRICS:
            if metric.stem in samples:
                name = metric.prometheus_name
                family = families[metric.kind](name, metric.text, labels=metric.labels)
                for sample in samples[metric.stem]:
                    family.add_metric(sample.labels, sample.value)
                yield family


def prometheus_client() -> Any:
    """The library; ConfigError where it is not installed."""
    try:
        import prometheus_client as client
        import prometheus_client.metrics_core
    except ModuleNotFoundError:
        raise ConfigError(
            "metrics: prometheus_client is not installed; pip install prometheus-client"
        ) from None
    return client


__getattr__ = old_names(__name__)
