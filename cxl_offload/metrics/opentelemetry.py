"""Metrics for OpenTelemetry, by its API alone: where they go is up to the program's provider."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import cxl_offload
from cxl_offload.errors import ConfigError
from cxl_offload.memory import Session
from cxl_offload.metrics.reader import MetricsReader
from cxl_offload.metrics.table import METRICS, Metric

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

_ONE_COLLECTION_S = 1.0
"""Instruments that are asked so close together get the same reading."""


def observe(provider: MeterProvider | None = None, *, session: Session | None = None) -> None:
    """Makes an observable instrument of every metric of this process.

    Parameters
    ----------
    provider
        What makes meters; None takes the one that the program has set with
        ``opentelemetry.metrics.set_meter_provider``.
    session
        Whose memory is shown; None means the one in use.

    Raises
    ------
    ConfigError
        ``opentelemetry-api`` is not installed, or the session is none.
    """
    if session is not None and not isinstance(session, Session):
        raise ConfigError(f"metrics: session {session!r}: a Session, or None for the one in use")
    try:
        from opentelemetry import metrics as api
    except ModuleNotFoundError:
        raise ConfigError(
            "metrics: opentelemetry is not installed; pip install opentelemetry-api"
        ) from None
    meter = api.get_meter("cxl_offload", cxl_offload.__version__, meter_provider=provider)
    reader = MetricsReader(session)
    make: dict[str, Callable[..., Any]] = {
        "gauge": meter.create_observable_gauge,
        "counter": meter.create_observable_counter,
    }
    for metric in METRICS:
        make[metric.kind](
            metric.otel_name,
            callbacks=[_callback(metric, reader, api.Observation)],
            unit=metric.otel_unit,
            description=metric.text,
        )


def _callback(
    metric: Metric, reader: MetricsReader, observation: type[Observation]
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def look(options: CallbackOptions) -> Iterable[Observation]:
        for sample in reader.read(most_age_s=_ONE_COLLECTION_S).get(metric.stem, ()):
            labels = dict(zip(metric.labels, sample.labels, strict=True))
            yield observation(sample.value, labels)

    return look
