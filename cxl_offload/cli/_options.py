"""Options that several subcommands have: one name, one help text, one reading of what is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from cxl_offload.errors import ConfigError
from cxl_offload.units import parse_bytes

T = TypeVar("T")

MACHINE, LIMITS, RESULTS = "Machine", "What may be used", "Results"
"""Headings of the help of commands with many options."""

AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print JSON and nothing else.", rich_help_panel=RESULTS),
]
Sysfs = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Read DIR/sys and DIR/proc, a capture of a machine."),
]
SimulatedMachine = Annotated[
    str | None,
    typer.Option(
        help="A machine file or the name of one that comes with the package: placements are on "
        "its simulated nodes; without it, on this machine's."
    ),
]


def names(text: str | None) -> tuple[str, ...] | None:
    """The parts of ``a,b,c``; None where nothing is given."""
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def pairs(
    option: str, texts: Iterable[str] | None, read: Callable[[str], T], *, form: str
) -> dict[str, T]:
    """What a repeatable option ``NAME=VALUE`` gives, each name once.

    Parameters
    ----------
    read
        Makes the value of its text; a ValueError refuses it.
    form
        What is expected, for messages: ``KIND=POLICY, such as kv=bind:cxl``.

    Raises
    ------
    ConfigError
        Names the option and its text.
    """
    found: dict[str, T] = {}
    for text in texts or ():
        name, _, value = text.partition("=")
        if not name or not value:
            raise ConfigError(f"{option} {text}: expected {form}")
        if name in found:
            raise ConfigError(f"{option} {text}: {name} is given twice; each once")
        try:
            found[name] = read(value)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{option} {text}: {error}; expected {form}") from None
    return found


def size(option: str, text: str) -> int:
    """Bytes of a size such as ``64GiB``.

    Raises
    ------
    ConfigError
        Names the option.
    """
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
