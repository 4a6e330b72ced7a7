"""What happened, as log records with fields: moves of memory, decisions of tuners.

The records go to the logger ``cxl_offload.events`` at level DEBUG, which nobody sees who does not
ask for it; :func:`cxl_offload.metrics.log_events` writes them as lines of JSON.
"""

from __future__ import annotations

import logging

EVENTS = logging.getLogger("cxl_offload.events")

EventValue = str | int | float | None


def tell(event: str, **fields: EventValue) -> None:
    """Logs an event; without a listener it costs one comparison.

    Parameters
    ----------
    event
        Its name: ``"move"``, ``"decision"``.
    fields
        What is known of it; bytes, seconds and names.
    """
    if EVENTS.isEnabledFor(logging.DEBUG):
        text = ", ".join(f"{name} {value}" for name, value in fields.items() if value is not None)
        EVENTS.debug("%s: %s", event, text, extra={"event": event, "event_fields": fields})
