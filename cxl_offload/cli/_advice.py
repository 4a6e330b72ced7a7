"""A warning where a plan that is advice only is followed all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from cxl_offload.plan.plan_file import Plan


def warn_of_advice(plan: Plan, path: str | Path, taken: str) -> None:
    """One line on stderr where no command runs the plan as it stands, with the plan's own reason.

    Parameters
    ----------
    path
        The file that the plan is of.
    taken
        What of it is used all the same, as in ``its places are``.
    """
    if not plan.runs:
        typer.echo(
            f"cxl-offload: warning: {path} is advice only: {plan.advice}; {taken} taken all the "
            "same",
            err=True,
        )
