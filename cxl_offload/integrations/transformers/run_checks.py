"""What of a run is refused before its model loads: what is tuned, and what ends a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.ranked import RankPart
from cxl_offload.integrations.transformers.tuning import ModelTuning, refuse_copies
from cxl_offload.memory import Session
from cxl_offload.objects.kind_store import TierStore
from cxl_offload.tune import Signal

if TYPE_CHECKING:
    from cxl_offload.integrations.transformers.generation import GenerateRun

_NO_WEIGHTS = ("kv", "activations")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTuning:
    """What follows the steps of a run, as ``tune`` of ``offload``.

    Parameters
    ----------
    signal
        ``"step_time"`` or ``"phase_time"``; None: nothing is tuned.
    budget_bytes
        Of weights that may move between two tokens, in the mean; 0 only logs advice.
    state
        A JSON file from which the next run goes on; None: there is none.
    """

    signal: Signal | None = None
    budget_bytes: int = 0
    state: str | None = None

    def checked(self, session: Session, store: TierStore, part: RankPart) -> ModelTuning | None:
        """What ``offload`` tunes by; None: nothing is tuned.

        Raises
        ------
        ConfigError
            In one line: a signal or a machine that cannot be tuned by, options without a signal,
            several ranks, or weights that do not move.
        """
        if self == RunTuning():
            return None
        part.check_alone("weights are tuned")
        made = ModelTuning.read(
            session,
            tune=self.signal,
            budget_bytes=self.budget_bytes,
            state=self.state,
            hot_expert_bytes=0,
        )
        refuse_copies(store, made)
        if not any(kind not in _NO_WEIGHTS for kind in store.parts):
            raise ConfigError(
                f"tune {self.signal}: no weights are in a tier that could follow; give a policy of "
                "weights, or leave it out"
            )
        return made


def check_options(request: GenerateRun) -> None:
    """Refuse options of a run that exclude each other.

    Raises
    ------
    ConfigError
        Names both.
    """
    if request.warmup and request.prefixes is not None:
        raise ConfigError(
            "a warm-up computes the prompts, and the run would find all of them kept; leave warmup "
            "or persist out"
        )
    if request.record and request.tuning.signal is not None:
        raise ConfigError("a trace is of weights that stay; leave it or tune out")


def check_stop(stop: int | None, config: Any) -> None:
    """Refuse a token that ends a row and that a model cannot make.

    Raises
    ------
    ConfigError
        It is not in the vocabulary.
    """
    if stop is not None and not 0 <= stop < config.vocab_size:
        raise ConfigError(
            f"stop {stop}: tokens of this model are 0 to {config.vocab_size - 1}; give one of them"
        )
