"""The options of tuning, the same words in every framework."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cxl_offload.errors import ConfigError
from cxl_offload.topology import Machine
from cxl_offload.tune.machine import tier_ratios
from cxl_offload.tune.tiers import near_and_far

Signal = Literal["step_time"]
"""What tuning goes by."""


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """How a framework's tensors are tuned.

    Attributes
    ----------
    budget_bytes
        Bytes that may move between two steps, in the mean; 0 only logs advice.
    state
        A JSON file that lets a restart go on; None keeps no state.
    """

    budget_bytes: int = 0
    state: Path | None = None


def read_tuning(
    tune: str | None, *, machine: Machine, budget_bytes: int = 0, state: str | Path | None = None
) -> TuneOptions | None:
    """The options of a run; None where nothing is to be tuned.

    Raises
    ------
    ConfigError
        In one line: an unknown signal, a negative budget, options without ``tune``, or a machine
        with one tier or without known bandwidths.
    """
    if tune is None:
        if budget_bytes or state is not None:
            raise ConfigError("tune_budget_bytes or tune_state without tune; give tune='step_time'")
        return None
    if tune != "step_time" or budget_bytes < 0:
        raise ConfigError(
            f"tune={tune!r} with {budget_bytes} bytes a step; known is 'step_time', with at least 0"
        )
    tier_ratios(machine, *near_and_far(machine))
    return TuneOptions(budget_bytes, None if state is None else Path(state))
