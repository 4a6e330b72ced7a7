"""Tunes memory that is placed once, at the start of a process, from one start to the next.

What a server pins at its start cannot move while the GPU may copy from it at any time. So a run
measures its own share, and what it learns decides where the regions of the next run go.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from cxl_offload.errors import ConfigError
from cxl_offload.memory import Policy
from cxl_offload.memory.bounds import whole_number
from cxl_offload.topology import Machine
from cxl_offload.tune.counts import count_decision
from cxl_offload.tune.decision import check_share
from cxl_offload.tune.gate import Gate, one_at_a_time
from cxl_offload.tune.machine import tier_ratios
from cxl_offload.tune.model_based import ModelTuner
from cxl_offload.tune.recording import RECORDING, StepRecording, recorded_before
from cxl_offload.tune.state_file import DAMAGED, read_state, write_state
from cxl_offload.tune.tiers import near_and_far, tier_policy
from cxl_offload.tune.window import StepSamples

_LOG = logging.getLogger("cxl_offload.tune")


class NewRegions:
    """The share of new regions on the far tier, learned from step times over several runs.

    Parameters
    ----------
    machine
        With a near and a far tier whose bandwidths are known.
    state
        A JSON file: read now where it exists, written after every decision.
    places
        Whether the regions of the next run follow the decisions. Otherwise decisions are only
        advice, because somebody has said where the regions go.
    steps, warm_up
        Steps of a window, and steps left out at the beginning.
    windows
        How many windows of a run count. More windows say little, and would outweigh those of other
        runs.
    framework
        For the counts of decisions.
    logger
        Gets every decision. It is the framework's own logger if the framework shows no others.

    Attributes
    ----------
    far
        Nodes of the far tier.
    share
        The share of the regions of this run.

    Raises
    ------
    ConfigError
        One tier only, unknown bandwidths, or a state file that is damaged.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        state: str | Path,
        places: bool = True,
        steps: int = 50,
        warm_up: int = 20,
        windows: int = 5,
        framework: str = "script",
        logger: logging.Logger = _LOG,
    ) -> None:
        self._gate = Gate()
        self._near, self.far = near_and_far(machine)
        ratios = tier_ratios(machine, self._near, self.far)
        self._tuner = ModelTuner(ratios)
        self._recording = StepRecording(ratios)
        self._state = Path(state)
        self._places = places
        self._framework = framework
        self._logger = logger
        self._windows = windows
        self._steps, self._warm_up = steps, warm_up
        self._samples: dict[int, StepSamples] = {}
        self._load: int | None = None
        saved = read_state(self._state)
        if saved is not None:
            self._restore(saved)
        self.share = self._tuner.share

    def _restore(self, saved: dict[str, Any]) -> None:
        try:
            load = saved["load"]
            self._load = None if load is None else int(load)
            self._tuner.restore(saved["model"])
        except DAMAGED as problem:
            raise ConfigError(
                f"{self._state}: the saved state is not that of new regions"
            ) from problem
        self._recording = recorded_before(saved, self._state, self._recording.ratios)

    def policy(self) -> Policy:
        """Where regions of this run go."""
        return tier_policy(self._near, self.far, self.share)

    def placed(self, share: float) -> None:
        """What was granted, asked from the pages: the windows are measured under this share."""
        check_share(share)
        self.share = share

    @one_at_a_time
    def step(self, seconds: float, *, load: int) -> None:
        """One step is over.

        Parameters
        ----------
        load
            How much a step does, such as its sequences. Only steps whose loads have the same power
            of two are compared. The loads that first fill a window decide which.
        """
        size = whole_number(load, "load").bit_length()
        if self._windows == 0 or self._load not in (None, size):
            return
        samples = self._samples.setdefault(
            size, StepSamples(steps=self._steps, warm_up=self._warm_up)
        )
        samples.add(seconds)
        if not samples.is_full:
            return
        self._load = size
        self._windows -= 1
        self._tuner.hold(self.share)
        window = samples.take(policy_changed=False)
        self._recording.add(self.share, window)
        decision = self._tuner.decide(window)
        changes = decision.share != self._tuner.nearest(self.share)
        verb = ("moved" if self._places else "advised") if changes else "kept"
        count_decision(self._framework, "share", verb, reason=decision.reason)  # type: ignore[arg-type]
        when = "from the next start on" if self._places else "advice only"
        self._logger.info("tune, %s: %s", when, decision.reason)
        saved = {"model": self._tuner.saved(), "load": self._load}
        write_state(self._state, {**saved, RECORDING: self._recording.document()})


class StepWatch:
    """Times steps from the beginning of one to that of the next, where both only decode.

    Parameters
    ----------
    regions
        Gets the times.
    """

    def __init__(self, regions: NewRegions) -> None:
        self._regions = regions
        self._began = 0.0
        self._sequences = 0

    def begins(self, sequences: int, tokens: int) -> None:
        """A step of so many sequences and tokens begins."""
        now = time.perf_counter()
        only_decodes = 0 < tokens == sequences
        if only_decodes and sequences == self._sequences:
            self._regions.step(now - self._began, load=sequences)
        self._sequences = sequences if only_decodes else 0
        self._began = now
