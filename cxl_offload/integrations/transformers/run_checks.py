"""What of a run is refused before its model loads: what is tuned, and what ends a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.kinds import is_of_weights
from cxl_offload.integrations.transformers.layer_shares import SplitPolicies
from cxl_offload.integrations.transformers.plans import PlanAnswer
from cxl_offload.integrations.transformers.ranked import RankPart
from cxl_offload.integrations.transformers.tuning import ModelTuning, refuse_copies
from cxl_offload.memory import Interleave, Session, Weighted
from cxl_offload.objects.kind_store import TierStore
from cxl_offload.plan.transformers.on_gpu import shared_policy
from cxl_offload.tune import Signal

if TYPE_CHECKING:
    from cxl_offload.integrations.transformers.generation import GenerateRun


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
            near_expert_bytes=0,
        )
        refuse_copies(store, made)
        if not any(is_of_weights(kind) for kind in store.parts):
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


def check_alone(request: GenerateRun, part: RankPart) -> None:
    """Refuse an accelerator, and a trace, among several ranks.

    Raises
    ------
    ConfigError
        Names which.
    """
    if request.record:
        part.check_alone("a run is recorded")
    if request.computes_on is not None:
        part.check_alone("an accelerator computes")


def check_rows_at_once(request: GenerateRun, asked: PlanAnswer, split: SplitPolicies) -> int | None:
    """Rows that a layer computes at once, as the request or its plan says; None: all.

    Raises
    ------
    ConfigError
        Rows are computed in turn, and the cache is in no tier; in terms of what was given.
    """
    rows = request.rows_at_once or asked.rows_at_once
    if rows is None or "kv" in split.on_host:
        return rows
    what = f"--rows-at-once {rows}" if request.rows_at_once else f"the plan's batches of {rows}"
    said = "it has no policy"
    if "kv" in request.place:
        said = f"--place kv={request.place['kv']} is none"
    elif request.plan is not None and "kv" in request.plan.policies:
        said = f"the plan's {request.plan.policies['kv']} is none"
    remedy = "kv=bind:ldram"
    if request.computes_on is not None:
        remedy = f"kv={shared_policy(1.0, 'bind:ldram')} for all of it on the accelerator"
    raise ConfigError(
        f"{what}: rows in turn need a policy of kv that names a tier, and {said}; give --place "
        f"{remedy}"
    )


def check_whole_sequences(request: GenerateRun, policies: Mapping[str, Any]) -> None:
    """Refuse whole sequences of a cache that no policy divides.

    Raises
    ------
    ConfigError
        Each sequence is on one node without the option.
    """
    policy = policies.get("kv")
    if request.whole_sequences and not isinstance(policy, Interleave | Weighted):
        where = "kv has no policy" if policy is None else f"kv={policy} divides no sequence"
        raise ConfigError(
            f"--whole-sequences: {where}, and it is for a kv that is weighted or interleaved; "
            "leave it out, or give such a policy by --place"
        )


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
