"""Windows of a run in a file, and what a tuner would have decided on them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cxl_offload.errors import ConfigError
from cxl_offload.files.text import parse_json, read_text, write_text
from cxl_offload.tune.curves import TierRatios
from cxl_offload.tune.decision import Bounds, Tuner, check_share
from cxl_offload.tune.state_file import DAMAGED, damage
from cxl_offload.tune.window import Window

_VERSION = 1

RECORDING = "recording"
"""The key of a state file under which its run is recorded."""

_MOST_WINDOWS = 1000
"""The most windows of a state file: those of the last runs, in a few dozen kilobytes."""


@dataclass(slots=True)
class StepRecording:
    """What a run measured.

    Attributes
    ----------
    ratios
        The far tier against the near one; None where nobody said.
    windows
        Share in force and window, in the order of the run.
    """

    ratios: TierRatios | None
    windows: list[tuple[float, Window]] = field(default_factory=list)

    def add(self, share: float, window: Window) -> None:
        """One more window."""
        check_share(share)
        self.windows.append((share, window))

    def save(self, path: str | Path) -> None:
        """Writes the recording as JSON."""
        write_text(Path(path), json.dumps(self.document(), indent=1) + "\n")

    def document(self) -> dict[str, Any]:
        """The recording as JSON, its last thousand windows."""
        rows = [
            {"share": share, "mean_s": one.mean_s, "error": one.error, "steps": one.steps}
            for share, one in self.windows[-_MOST_WINDOWS:]
        ]
        known = self.ratios
        ratios = known and {"bandwidth": known.bandwidth, "latency": known.latency}
        return {"version": _VERSION, "ratios": ratios, "windows": rows}

    @classmethod
    def load(cls, path: str | Path) -> StepRecording:
        """Reads what :meth:`save` wrote, or the state file of a tuned run.

        Raises
        ------
        ConfigError
            The file is no recording; says where it is wrong.
        """
        document: Any = parse_json(read_text(path), file=str(path))
        if isinstance(document, dict) and RECORDING in document:
            document = document[RECORDING]
        return cls.read(document, path)

    @classmethod
    def read(cls, document: Any, path: str | Path) -> StepRecording:
        """What :meth:`document` gave; ``path`` is where it was, for errors as of :meth:`load`."""
        try:
            if document["version"] != _VERSION:
                raise ConfigError(f"{path}: version {document['version']!r}, known is {_VERSION}")
            known = document["ratios"]
            ratios = None
            if known is not None:
                ratios = TierRatios(float(known["bandwidth"]), float(known["latency"]))
            made = cls(ratios)
            for number, row in enumerate(document["windows"]):
                made.add(float(row["share"]), _window(path, number, row))
        except ConfigError:
            raise
        except DAMAGED as problem:
            raise ConfigError(
                f"{path}: not a recording of step times ({damage(problem)})"
            ) from problem
        if not made.windows:
            raise ConfigError(f"{path}: the recording has no window")
        return made


def _window(path: str | Path, number: int, row: Any) -> Window:
    window = Window(float(row["mean_s"]), float(row["error"]), int(row["steps"]))
    sound = 0 <= window.error < math.inf and window.steps > 0
    if not sound or not 0 <= float(row["share"]) <= 1:
        raise ConfigError(
            f"{path}: window {number}: need a share from 0 to 1, a positive mean_s, an error of at "
            "least 0 and at least one step"
        )
    return window


def recorded_before(saved: dict[str, Any], path: Path, ratios: TierRatios | None) -> StepRecording:
    """The recording in a state file, to go on with; an empty one where it has none.

    Raises
    ------
    ConfigError
        The recording is damaged.
    """
    made = StepRecording(ratios)
    document = saved.get(RECORDING)
    if document is not None:
        made.windows = StepRecording.read(document, path).windows
    return made


@dataclass(frozen=True, slots=True)
class ReplayedDecision:
    """One decision of a replay.

    Attributes
    ----------
    asked, measured_at
        The share that the tuner wanted measured, and the nearest one that the run has.
    share, reason
        The decision.
    """

    asked: float
    measured_at: float
    mean_s: float
    share: float
    reason: str


def replay_recording(
    recording: StepRecording,
    tuner: Tuner,
    *,
    decisions: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[ReplayedDecision]:
    """What ``tuner`` would have decided.

    A run has measured only the shares that were in force. If the tuner wants another share, it gets
    a window of the nearest measured one, and the answer says so. The windows of a share come in the
    order of the run. When they are used up, they begin again.

    Parameters
    ----------
    decisions
        How many; as many as the recording has windows by default.
    progress
        Told after each how many were made, and how many there will be.

    Raises
    ------
    ConfigError
        The recording has no window.
    """
    if not recording.windows:
        raise ConfigError("the recording has no window: the run was shorter than one decision")
    by_share: dict[float, list[Window]] = {}
    for share, window in recording.windows:
        by_share.setdefault(share, []).append(window)
    used = dict.fromkeys(by_share, 0)
    bounds = Bounds(min(by_share), max(by_share))
    made = []
    total = len(recording.windows) if decisions is None else decisions
    for done in range(total):
        asked = tuner.share
        at = min(by_share, key=lambda share: abs(share - asked))
        window = by_share[at][used[at] % len(by_share[at])]
        used[at] += 1
        decision = tuner.decide(window, bounds)
        made.append(ReplayedDecision(asked, at, window.mean_s, decision.share, decision.reason))
        progress(done + 1, total)
    return made
