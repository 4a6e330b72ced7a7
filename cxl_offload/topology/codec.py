"""A machine as JSON and back, without loss: the field names of the model are the format."""

from __future__ import annotations

import json

from cxl_offload.files import decode_json, encode
from cxl_offload.topology.model import Machine


def machine_to_json(machine: Machine, *, indent: int | None = 2) -> str:
    """JSON with a stable order of keys; the same machine always gives the same text."""
    return json.dumps(encode(machine), indent=indent, ensure_ascii=False)


def machine_from_json(text: str) -> Machine:
    """The machine of :func:`machine_to_json`'s text.

    Raises
    ------
    ConfigError
        The text is not JSON, or not of a machine; the message names the field.
    """
    return decode_json(Machine, text)
