"""Starts metrics and events in programs that cannot be changed, as their environment says."""

from __future__ import annotations

import logging
import os

from cxl_offload.errors import ConfigError
from cxl_offload.memory import Session
from cxl_offload.metrics.endpoint import HERE, MetricsServer, serve

METRICS_VARIABLE = "CXL_OFFLOAD_METRICS"
"""``PORT`` or ``HOST:PORT``; each process of a launcher adds its ``LOCAL_RANK``."""

_LOG = logging.getLogger(__name__)


def read_address(text: str) -> tuple[str, int]:
    """Host and port of ``PORT``, ``HOST:PORT`` or ``[IPv6]:PORT``.

    Raises
    ------
    ConfigError
        The port is no number from 0 to 65535.
    """
    host, colon, port = text.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535
    if not is_port or (colon and not host):
        raise ConfigError(f"metrics {text!r}: need PORT or HOST:PORT, such as 9400 or 0.0.0.0:9400")
    return host.removeprefix("[").removesuffix("]") or HERE, int(port)


def serve_at(text: str, session: Session | None = None) -> MetricsServer:
    """:func:`serve` at an address as it is written on a command line.

    Processes of one job have a port each: that of the address and their local rank.

    Raises
    ------
    ConfigError
        It cannot be listened on, or ``LOCAL_RANK`` is no number.
    """
    host, port = read_address(text)
    rank = os.environ.get("LOCAL_RANK", "0")
    if not (rank.isascii() and rank.isdigit()):
        raise ConfigError(f"metrics {text!r}: LOCAL_RANK is {rank[:40]!r}, which is no number")
    return serve(port + int(rank) if port else 0, host=host, session=session)


def start_from_environment() -> None:
    """Serves where the variable asks for it.

    What cannot be started is a warning: a program that trains is not ended for its metrics.
    """
    address = os.environ.get(METRICS_VARIABLE)
    try:
        if address:
            _LOG.info("metrics at %s", serve_at(address).url)
    except ConfigError as error:
        _LOG.warning("%s", error)
