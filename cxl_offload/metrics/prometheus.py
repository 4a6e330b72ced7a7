"""Metrics for Prometheus: a collector for any registry, and an endpoint of our own."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cxl_offload.core import ForkGuard
from cxl_offload.errors import ConfigError
from cxl_offload.memory import Session
from cxl_offload.metrics.reader import MetricsReader
from cxl_offload.metrics.table import METRICS

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

HERE = "127.0.0.1"
"""Only this machine may read what is served there; ``0.0.0.0`` is for all."""

_LARGEST_PORT = 65535


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
        _prometheus()
        self._reader = MetricsReader(session)

    def describe(self) -> list[Family]:
        """Nothing, so that registering it reads nothing."""
        return []

    def collect(self) -> Iterator[Family]:
        """Called by the registry for every scrape."""
        core = _prometheus().metrics_core
        families = {"gauge": core.GaugeMetricFamily, "counter": core.CounterMetricFamily}
        samples = self._reader.read()
        for metric in METRICS:
            if metric.stem in samples:
                name = metric.prometheus_name
                family = families[metric.kind](name, metric.text, labels=metric.labels)
                for sample in samples[metric.stem]:
                    family.add_metric(sample.labels, sample.value)
                yield family


class MetricsServer:
    """An endpoint that answers until it is closed, or the process ends.

    Attributes
    ----------
    host, port
        Where it listens.
    """

    def __init__(self, host: str, port: int, server: Any, thread: Any) -> None:
        self.host, self.port = host, port
        self._server, self._thread = server, thread
        self._guard = ForkGuard()
        _open_servers.add(self)

    @property
    def url(self) -> str:
        """What Prometheus is pointed at."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def __repr__(self) -> str:
        return f"<MetricsServer at {self.url}>"

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Answers nobody any more and frees the port; again, or in a forked child, does nothing."""
        server, self._server = self._server, None
        if server is None or self._guard.in_child:
            return
        server.shutdown()
        server.server_close()
        self._thread.join()

    def _leave_to_parent(self) -> None:
        """A forked child does not keep the port of its parent."""
        if self._server is not None:
            os.close(self._server.socket.detach())


_open_servers: weakref.WeakSet[MetricsServer] = weakref.WeakSet()


def _leave_servers_to_parent() -> None:
    for server in list(_open_servers):
        server._leave_to_parent()
    _open_servers.clear()


os.register_at_fork(after_in_child=_leave_servers_to_parent)


def serve(port: int, *, host: str = HERE, session: Session | None = None) -> MetricsServer:
    """Serves all metrics of this process to Prometheus, from a thread of its own.

    Parameters
    ----------
    port
        0 takes any free one; the answer says which.
    host
        Address to listen on; by default nobody but this machine can read.
    session
        Whose memory is shown; None means the one in use.

    Raises
    ------
    ConfigError
        ``prometheus_client`` is not installed, or the address cannot be listened on: it is taken,
        privileged or none.
    """
    client = _prometheus()
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= _LARGEST_PORT:
        raise ConfigError(f"metrics: port {port!r}: a number from 0 to {_LARGEST_PORT}")
    if not isinstance(host, str) or not host:
        raise ConfigError(f"metrics: host {host!r}: a name or an address, such as {HERE}")
    registry = client.CollectorRegistry()
    registry.register(PrometheusCollector(session))
    try:
        server, thread = client.start_http_server(port, addr=host, registry=registry)
    except (OSError, ValueError) as error:  # names that cannot be looked up are either
        raise ConfigError(f"metrics: cannot listen on {host}:{port}: {_reason(error)}") from None
    return MetricsServer(host, int(server.server_port), server, thread)


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if isinstance(error, socket.gaierror | UnicodeError):
        return f"no such host ({text})"
    if isinstance(error, PermissionError):
        return f"{text}; ports below 1024 need root: choose a larger one"
    return f"{text}; choose another port, or 0 for any that is free"


def _prometheus() -> Any:
    try:
        import prometheus_client
        import prometheus_client.metrics_core
    except ModuleNotFoundError:
        raise ConfigError(
            "metrics: prometheus_client is not installed; pip install prometheus-client"
        ) from None
    return prometheus_client
