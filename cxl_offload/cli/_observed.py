"""What runs is watched: ``--metrics``, ``--events``, and memory that fails under it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from cxl_offload.cli._options import RESULTS

if TYPE_CHECKING:
    from cxl_offload.memory import Session

Metrics = Annotated[
    str | None,
    typer.Option(
        metavar="[HOST:]PORT",
        envvar="CXL_OFFLOAD_METRICS",
        show_envvar=False,
        help="Serve metrics to Prometheus there while it runs.",
        rich_help_panel=RESULTS,
    ),
]
Events = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        envvar="CXL_OFFLOAD_EVENTS",
        show_envvar=False,
        help="Append every move and every decision of a tuner there, a line of JSON each.",
        rich_help_panel=RESULTS,
    ),
]


@contextlib.contextmanager
def observed(metrics: str | None, events: str | None, session: Session) -> Iterator[None]:
    """Serves and logs as asked for while the block runs; says on stderr where.

    Memory that fails meanwhile is an error of one line.

    Raises
    ------
    ConfigError
        Either cannot be started.
    """
    from cxl_offload.memory.lost import may_survive, survive_memory_errors

    with contextlib.ExitStack() as opened:
        if may_survive():
            opened.enter_context(survive_memory_errors())
        if events:
            from cxl_offload.metrics import log_events

            opened.enter_context(log_events(events))
        if metrics:
            from cxl_offload.metrics.environment import serve_at

            server = opened.enter_context(serve_at(metrics, session))
            typer.echo(f"metrics: {server.url}", err=True)
        yield
