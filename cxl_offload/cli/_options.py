"""Options that several subcommands have: one name, one help text, one reading of what is given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cxl_offload.integrations import run_options as run

MACHINE, LIMITS, RESULTS = "Machine", "What may be used", "Results"
"""Headings of the help of commands with many options."""

AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print JSON and nothing else.", rich_help_panel=RESULTS),
]
RunOutput = Annotated[
    str | None,
    typer.Option(
        "--output",
        metavar="FILE",
        help="Write the same as JSON there.",
        rich_help_panel=RESULTS,
    ),
]
Limit = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TIER=SIZE",
        help="Most of a tier to use, e.g. cxl=64GiB; may be repeated.",
        rich_help_panel=LIMITS,
    ),
]
Sysfs = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Read DIR/sys and DIR/proc, a capture of a machine."),
]
NamedTier = Annotated[
    list[str] | None,
    typer.Option(run.TIER.flag, metavar=run.TIER.metavar, help=run.TIER.sentence),
]
Tune = Annotated[
    str | None,
    typer.Option(
        run.TUNE.flag,
        metavar="step_time|phase_time",
        help=f"{run.TUNE.sentence} phase_time: prompts and tokens have a share each.",
    ),
]
TuneBudget = Annotated[
    str,
    typer.Option(
        run.TUNE_BUDGET.flag, metavar=run.TUNE_BUDGET.metavar, help=run.TUNE_BUDGET.sentence
    ),
]
TuneState = Annotated[
    str | None,
    typer.Option(run.TUNE_STATE.flag, metavar=run.TUNE_STATE.metavar, help=run.TUNE_STATE.sentence),
]
Stop = Annotated[
    int | None, typer.Option(run.STOP.flag, metavar=run.STOP.metavar, help=run.STOP.sentence)
]
Warmup = Annotated[bool, typer.Option(run.WARMUP.flag, help=run.WARMUP.sentence)]
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
