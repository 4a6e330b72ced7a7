"""The endpoint that Prometheus asks, in a thread of the process that it tells of.

Whoever can reach it may send what they like, while a training runs: a request that does not end, a
header that cannot be read, a hundred connections at once. None of them may print into that program,
hold its threads or keep the next scrape waiting. ``prometheus_client.start_http_server`` lets all
three happen.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from types import TracebackType
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from cxl_offload.core import ForkGuard
from cxl_offload.errors import ConfigError
from cxl_offload.memory import Session
from cxl_offload.metrics.prometheus import PrometheusCollector, prometheus_client

HERE = "127.0.0.1"
"""Only this machine may read what is served there; ``0.0.0.0`` is for all."""

SILENT_SECONDS = 10.0
"""How long a connection may say nothing, or read nothing, before it is closed."""

MOST_CONNECTIONS = 16
"""Each has a thread. One more closes the oldest, so that a scrape always gets in."""

_LARGEST_PORT = 65535
_LOG = logging.getLogger(__name__)

_WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class _Request(WSGIRequestHandler):
    """One request, answered without a word on the program's own output."""

    timeout = SILENT_SECONDS

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the other side said nothing, or went away
            super().handle()

    def log_message(self, *arguments: Any) -> None:
        """Nothing."""


class _Listener(ThreadingMixIn, WSGIServer):
    """A thread for each connection, and not too many."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, family: int, address: Any) -> None:
        self.address_family = family
        self._opening = threading.Lock()
        self._open: list[socket.socket] = []
        super().__init__(address, _Request)

    def server_bind(self) -> None:
        """Without asking for the host's full name: a name server may take long to answer."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._opening:
            self._open.append(request)
            oldest = self._open.pop(0) if len(self._open) > MOST_CONNECTIONS else None
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._opening:
            if request in self._open:
                self._open.remove(request)
        super().shutdown_request(request)


def _careful(answer: _WsgiApp) -> _WsgiApp:
    """The same answers, and one line of log instead of a traceback where there is none."""

    def careful(asked: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if asked["REQUEST_METHOD"] == "HEAD":  # health checks ask so
            list(careful(asked | {"REQUEST_METHOD": "GET"}, start))
            return []
        with contextlib.suppress(Exception):  # an Accept header that cannot be read
            return answer(asked, start)
        try:
            return answer(asked | {"HTTP_ACCEPT": ""}, start)
        except Exception as error:  # the program that is watched goes on
            _LOG.warning("a scrape was not answered: %s: %s", type(error).__name__, error)
            start("500 Internal Server Error", [("Content-Type", "text/plain")])
            return [b"the metrics could not be read; the log of the process says why\n"]

    return careful


class MetricsServer:
    """An endpoint that answers until it is closed, or the process ends.

    Attributes
    ----------
    host, port
        Where it listens.
    """

    def __init__(self, host: str, listener: _Listener) -> None:
        self.host, self.port = host, int(listener.server_port)
        self._listener: _Listener | None = listener
        self._guard = ForkGuard()
        self._thread = threading.Thread(
            target=self._answer, args=(listener,), name="metrics", daemon=True
        )
        self._thread.start()
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

    def _answer(self, listener: _Listener) -> None:
        while self._listener is listener:  # sleeps in the kernel between requests
            listener.handle_request()

    def close(self) -> None:
        """Answers nobody any more and frees the port; again, or in a forked child, does nothing."""
        listener, self._listener = self._listener, None
        if listener is None or self._guard.in_child:
            return
        with contextlib.suppress(OSError):
            listener.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        listener.server_close()

    def _leave_to_parent(self) -> None:
        """A forked child does not keep the port of its parent."""
        if self._listener is not None:
            os.close(self._listener.socket.detach())


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
    client = prometheus_client()
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= _LARGEST_PORT:
        raise ConfigError(f"metrics: port {port!r}: a number from 0 to {_LARGEST_PORT}")
    if not isinstance(host, str) or not host:
        raise ConfigError(f"metrics: host {host!r}: a name or an address, such as {HERE}")
    registry = client.CollectorRegistry()
    registry.register(PrometheusCollector(session))
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        listener = _Listener(family, address)
    except (OSError, ValueError) as error:  # names that cannot be looked up are either
        raise ConfigError(f"metrics: cannot listen on {host}:{port}: {_reason(error)}") from None
    listener.set_app(_careful(client.make_wsgi_app(registry)))
    return MetricsServer(host, listener)


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if isinstance(error, socket.gaierror | UnicodeError):
        return f"no such host ({text})"
    if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
        return f"no address of this machine; {HERE} is, and 0.0.0.0 means all"
    if isinstance(error, PermissionError):
        return f"{text}; ports below 1024 need root: choose a larger one"
    return f"{text}; choose another port, or 0 for any that is free"
