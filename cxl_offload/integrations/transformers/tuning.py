"""What follows the steps of a model: the share of its weights far away, its experts and caches."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.asked_experts import expert_layers
from cxl_offload.integrations.transformers.linear_layers import policies_with_copies
from cxl_offload.integrations.transformers.most_used_experts import MostUsedExperts
from cxl_offload.integrations.transformers.near_caches import NearCaches
from cxl_offload.integrations.transformers.phases import TunedPhases, new_tokens
from cxl_offload.memory import Session
from cxl_offload.objects.kind_store import TierStore
from cxl_offload.tune import StepTuner, TuneOptions, read_tuning
from cxl_offload.tune.homes import tensors_of
from cxl_offload.tune.optimizer import step_tuner
from cxl_offload.tune.options import check_bytes


@dataclass(frozen=True, slots=True)
class TunedModel:
    """What follows a model now.

    Attributes
    ----------
    weights
        The share on the far tier; None without ``tune="step_time"``.
    phases
        Shares and threads of prefill and decode; None without ``tune="phase_time"``.
    caches
        KV caches by their next use; None without ``near_kv_bytes``.
    experts
        The most used experts near; None without ``near_expert_bytes``.
    """

    weights: TunedWeights | None
    experts: MostUsedExperts | None
    phases: TunedPhases | None = None
    caches: NearCaches | None = None


@dataclass(frozen=True, slots=True)
class ModelTuning:
    """What is to follow the steps of a model.

    Attributes
    ----------
    session
        The session that the weights are in.
    share
        Of the placed weights on the far tier; None: it stays.
    experts
        Budget and state file of experts; None: experts stay.
    near_expert_bytes, near_kv_bytes
        Room on the near tier for experts and for KV caches; 0: they stay.
    budget_bytes
        For KV caches.
    """

    session: Session
    share: TuneOptions | None
    experts: TuneOptions | None
    near_expert_bytes: int
    near_kv_bytes: int = 0
    budget_bytes: int = 0

    @classmethod
    def read(
        cls,
        session: Session,
        *,
        tune: str | None,
        budget_bytes: int,
        state: str | Path | None,
        near_expert_bytes: int,
        threads: Sequence[int] = (),
        near_kv_bytes: int = 0,
    ) -> ModelTuning | None:
        """The options of ``offload``; None where nothing is to follow.

        Raises
        ------
        ConfigError
            As :func:`cxl_offload.tune.read_tuning`, and for negative bytes.
        """
        check_bytes(near_expert_bytes, "near_expert_bytes")
        check_bytes(near_kv_bytes, "near_kv_bytes")
        check_bytes(budget_bytes, "tune_budget_bytes")
        experts = None
        if near_expert_bytes:
            own = None if state is None else Path(f"{state}.experts")
            experts = TuneOptions(budget_bytes, own)
        share = None
        comes_near = experts is not None or near_kv_bytes > 0
        if tune is not None or not comes_near or threads:
            share = read_tuning(
                tune,
                machine=session.machine,
                budget_bytes=budget_bytes,
                state=state,
                threads=threads,
            )
        if share is None and not comes_near:
            return None
        return cls(session, share, experts, near_expert_bytes, near_kv_bytes, budget_bytes)

    @contextlib.contextmanager
    def following(self, model: nn.Module) -> Iterator[TunedModel]:
        """Follows the model inside of the block; its weights are in memory of the session."""
        with contextlib.ExitStack() as stack:
            experts = weights = phases = caches = None
            if self.near_kv_bytes:
                caches = NearCaches(
                    self.session, near_bytes=self.near_kv_bytes, budget_bytes=self.budget_bytes
                )
                stack.enter_context(caches.following(model))
            if self.experts is not None:
                experts = MostUsedExperts(
                    model, self.session, near_bytes=self.near_expert_bytes, options=self.experts
                )
                stack.enter_context(experts.following(model))
            if self.share is not None:
                layers = expert_layers(model) if experts is not None else {}
                found = {
                    name: weight.data
                    for name, weight in model.named_parameters()
                    if not any(name.startswith(f"{layer}.") for layer in layers)
                }
                if self.share.by_phase:
                    phases = TunedPhases(found, self.session, self.share)
                    stack.enter_context(phases.following(model))
                else:
                    weights = TunedWeights(found, self.session, self.share)
                    stack.enter_context(weights.following(model))
            yield TunedModel(weights, experts, phases, caches)


def refuse_copies(store: TierStore, tuning: ModelTuning | None) -> None:
    """Copies near CPU threads do not move."""
    if tuning is None or (tuning.share is None and tuning.experts is None):
        return
    for kind, policy in policies_with_copies(store):
        raise ConfigError(
            f"policy of {kind}: {policy}: copies do not move; leave tune and near_expert_bytes "
            f"out, or bind or interleave {kind}"
        )


class TunedWeights:
    """Tunes the share of weights on the far tier by the time of decode steps.

    A step is one forward pass that reads one new token of every sequence, without what
    ``generate()`` does in between. Prompts are not measured: they are bound by computing. A pass
    of another number of sequences begins a new window.

    Parameters
    ----------
    weights
        Name to weight; those that are not in memory of the session are left out.

    Attributes
    ----------
    tuner
        The tuner; None where no weight is in memory of the session, and after the block.
    """

    def __init__(
        self, weights: dict[str, torch.Tensor], session: Session, options: TuneOptions
    ) -> None:
        found = tensors_of(session, weights)
        self.tuner: StepTuner | None = None
        if found:
            self.tuner = step_tuner(
                found,
                session=session,
                budget_bytes_per_step=options.budget_bytes,
                state=options.state,
                framework="transformers",
            )
        self._began = 0.0
        self._rows = 0

    @contextlib.contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Measures and moves inside of the block; lets go of the weights at its end."""
        hooks = [
            model.register_forward_pre_hook(self._before),
            model.register_forward_hook(self._after, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self.tuner = None

    def _before(self, model: nn.Module, args: Any) -> None:
        self._began = time.perf_counter()

    def _after(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seconds = time.perf_counter() - self._began
        given = new_tokens(args, kwargs)
        if self.tuner is None or given is None or given.shape[1] != 1:
            return
        rows = int(given.shape[0])
        if rows != self._rows:
            self._rows = rows
            self.tuner.restart()
        self.tuner.step(seconds)
