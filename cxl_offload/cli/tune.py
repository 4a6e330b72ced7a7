"""``cxl-offload tune``: what a tuner makes of a recorded run."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cxl_offload.cli._options import AsJson
from cxl_offload.cli._progress import progress_bar
from cxl_offload.cli._report_table import console_of, show, table
from cxl_offload.cli._run_report import write_json
from cxl_offload.errors import ConfigError

if TYPE_CHECKING:
    from cxl_offload.tune import StepRecording, Tuner


class TunerName(str, Enum):
    """Tuners of the command line."""

    MODEL = "model"
    CLIMB = "climb"
    CAPTION = "caption"


def tune(
    replay: Annotated[
        Path, typer.Option(help="The state file of a tuned run, or what StepRecording.save wrote.")
    ],
    tuner: Annotated[
        TunerName,
        typer.Option(
            help="model: from the machine's profile; climb: hill climbing on whole weights; "
            "caption: the published listing."
        ),
    ] = TunerName.MODEL,
    as_json: AsJson = False,
) -> None:
    """Replay a recorded run: which share each window leads to, and why.

    Example: cxl-offload tune --replay run.json --tuner climb
    """
    from cxl_offload.tune import StepRecording, replay_recording

    recording = StepRecording.load(replay)
    with progress_bar(keep=False, lines=not as_json) as tell:
        decisions = replay_recording(
            recording,
            _make(tuner, recording),
            progress=lambda done, total: tell("windows replayed", done, total),
        )
    if as_json:
        rows = [dataclasses.asdict(one) for one in decisions]
        write_json("-", {"tuner": tuner.value, "decisions": rows})
        return
    title = f"{tuner.value} on {replay.name}, step times measured in that run"
    numbers = ("asked", "measured at", "step")
    made = table(title, *numbers, "decision", right=numbers)
    for one in decisions:
        made.add_row(
            f"{one.asked:.0%}", f"{one.measured_at:.0%}", f"{one.mean_s:.4g} s", one.reason
        )
    show(console_of(), made)


def _make(name: TunerName, recording: StepRecording) -> Tuner:
    from cxl_offload.tune import Climb, ModelTuner, PublishedCaption

    match name:
        case TunerName.MODEL:
            if recording.ratios is None:
                raise ConfigError(
                    "the recording does not say how its tiers compare; replay it with --tuner "
                    "climb or --tuner caption"
                )
            return ModelTuner(recording.ratios, start=recording.windows[0][0])
        case TunerName.CLIMB:
            return Climb()
        case TunerName.CAPTION:
            return PublishedCaption()


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(tune)
