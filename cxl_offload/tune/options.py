"""The options of tuning, the same words in every framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from cxl_offload.errors import ConfigError
from cxl_offload.memory.bounds import check_number, quoted
from cxl_offload.topology import Machine
from cxl_offload.topology.model import MOST_CPUS
from cxl_offload.tune.machine import tier_ratios
from cxl_offload.tune.tiers import near_and_far

Signal = Literal["step_time", "phase_time"]
"""What a tuner measures: the time of whole steps, or of each phase by itself."""


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """How a framework's tensors are tuned.

    Attributes
    ----------
    budget_bytes
        Bytes that may move between two steps, in the mean; 0 only logs advice.
    state
        A JSON file that lets a restart go on; None keeps no state.
    by_phase
        Whether each phase has a share of its own.
    threads
        Numbers of threads that each phase tries. If empty, phases keep the threads they have.
    """

    budget_bytes: int = 0
    state: Path | None = None
    by_phase: bool = False
    threads: tuple[int, ...] = ()


def check_bytes(nbytes: object, name: str) -> None:
    """Refuses an option that is no number of bytes (ConfigError)."""
    try:
        check_number(nbytes, name)
    except (TypeError, ValueError) as problem:
        raise ConfigError(str(problem)) from None


def read_tuning(
    tune: str | None,
    *,
    machine: Machine,
    budget_bytes: int = 0,
    state: str | Path | None = None,
    threads: Sequence[int] = (),
    signals: Sequence[str] = get_args(Signal),
) -> TuneOptions | None:
    """The options of a run, or None if nothing is to be tuned.

    Parameters
    ----------
    signals
        What the framework can go by.

    Raises
    ------
    ConfigError
        In one line: an unknown signal, a negative budget, options without ``tune``, or a machine
        with one tier or without known bandwidths.
    """
    if tune is None:
        if budget_bytes or state is not None or threads:
            raise ConfigError(
                "tune_budget_bytes, tune_state or tune_threads without tune; give tune='step_time'"
            )
        return None
    check_bytes(budget_bytes, "tune_budget_bytes")
    if tune not in signals:
        known = " or ".join(repr(each) for each in signals)
        raise ConfigError(f"tune={tune!r}; known is {known}")
    sound = all(isinstance(one, int) and 1 <= one <= MOST_CPUS for one in threads)
    if not sound or len(set(threads)) != len(threads):
        raise ConfigError(
            f"tune_threads {quoted(list(threads))}: numbers from 1 to {MOST_CPUS}, each once"
        )
    if threads and tune != "phase_time":
        raise ConfigError("tune_threads: threads belong to phases; give tune='phase_time'")
    tier_ratios(machine, *near_and_far(machine))
    path = None if state is None else Path(state)
    return TuneOptions(budget_bytes, path, tune == "phase_time", tuple(threads))
