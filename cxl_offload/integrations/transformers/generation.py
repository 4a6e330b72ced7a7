"""One generation from request to report: what ``cxl-offload generate`` does."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from cxl_offload.integrations.fit import TierLimit
from cxl_offload.integrations.model_folder import check_checkpoint
from cxl_offload.integrations.planned_threads import planned_threads
from cxl_offload.integrations.run_report import RunReport
from cxl_offload.integrations.transformers.accelerator_kv import AcceleratorKv, accelerator_kv
from cxl_offload.integrations.transformers.accelerator_trace import recorder_for
from cxl_offload.integrations.transformers.answers import Prompts
from cxl_offload.integrations.transformers.attention import AttentionCalls
from cxl_offload.integrations.transformers.before_loading import RunPlaces, check_before_loading
from cxl_offload.integrations.transformers.compute_device import chosen_device
from cxl_offload.integrations.transformers.kinds import chosen_policies
from cxl_offload.integrations.transformers.layer_shares import SplitPolicies, split_for
from cxl_offload.integrations.transformers.linear_layers import rows_by
from cxl_offload.integrations.transformers.loading import load
from cxl_offload.integrations.transformers.model_device import ModelDevice
from cxl_offload.integrations.transformers.plans import planned_for, weights_as
from cxl_offload.integrations.transformers.prefix_options import KeptPrefixes, PrefixCounts
from cxl_offload.integrations.transformers.prefixes import checked_prefixes
from cxl_offload.integrations.transformers.prompt_ids import tokenized
from cxl_offload.integrations.transformers.ranked import RankPart, report_of_all
from cxl_offload.integrations.transformers.room import KeptAs, KvMemory, kept_as
from cxl_offload.integrations.transformers.run_checks import (
    RunTuning,
    check_alone,
    check_options,
    check_rows_at_once,
    check_whole_sequences,
)
from cxl_offload.integrations.transformers.scope import Offloaded
from cxl_offload.integrations.transformers.token_clock import TokenClock
from cxl_offload.integrations.transformers.tuning import ModelTuning
from cxl_offload.integrations.transformers.weights import meta_model, store_for
from cxl_offload.memory import Session, current_session
from cxl_offload.objects.kind_store import TierStore
from cxl_offload.objects.load_parts import LoadClock
from cxl_offload.objects.placement_rows import placement_rows
from cxl_offload.ops.shared_cpus import SharedCpus, share_cpus
from cxl_offload.plan.plan_file import Plan
from cxl_offload.profile.schedule import Progress
from cxl_offload.sim.trace import Trace

_ALONE = RankPart()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRun:
    """What to generate, and where each kind of tensor lies.

    Parameters
    ----------
    model
        Folder of a checkpoint, or a GGUF file.
    prompts
        Texts, one a row; all are one batch.
    place
        Kind to policy, as of :func:`~cxl_offload.integrations.transformers.offload`; what it names
        goes before the plan.
    limits
        Tiers, and the most that the run may put there.
    plan
        Says the policies of kinds and the rows at once; None: ``place`` does.
    rows_at_once
        Rows that a layer computes at once; None: what the plan says, or all.
    kv_dtype
        ``"float8_e4m3fn"``, ``"float8_e5m2"`` or ``"int4"``; None: the plan's, or that of the
        weights.
    whole_sequences
        With a policy of ``kv`` that stripes, every sequence's keys and values lie on one node.
    prefixes
        Where the KV of the prompts' beginnings is kept for the next run; None: nowhere.
    gen_len
        Tokens to generate; a row may end earlier.
    tokenizer
        Folder with tokenizer files; None: the model's.
    dtype
        Of weights and cache; ``"auto"`` is that of the plan, or of the checkpoint.
    attention
        ``"eager"`` or ``"sdpa"`` for prompts; None is the model's own choice.
    accelerator
        ``"cuda"`` or ``"cuda:0"``, as of ``offload``; None: what the plan says, or the CPU.
    accelerator_kv
        Share of the cache's positions there, as of ``offload``; None: what the policy of ``kv``
        says.
    cpu_linear
        ``"torch"``, or ``"fastest"``: linear layers as of ``offload(linear_rows="fastest")``.
    record
        Whether the report has a trace of what a process alone read, wrote, copied and computed.
    stop
        A token that ends a row, besides the model's own; None: these alone.
    warmup
        Whether one token is generated before anything is measured.
    tuning
        What follows the time of the tokens; by default nothing.
    """

    model: str
    prompts: tuple[str, ...]
    place: Mapping[str, str] = field(default_factory=dict)
    limits: tuple[TierLimit, ...] = ()
    plan: Plan | None = None
    rows_at_once: int | None = None
    kv_dtype: str | None = None
    whole_sequences: bool = False
    prefixes: KeptPrefixes | None = None
    gen_len: int = 32
    tokenizer: str | None = None
    dtype: str = "auto"
    attention: str | None = None
    accelerator: str | None = None
    accelerator_kv: float | None = None
    cpu_linear: Literal["torch", "fastest"] = "torch"
    record: bool = False
    stop: int | None = None
    warmup: bool = False
    tuning: RunTuning = field(default_factory=RunTuning)

    @property
    def computes_on(self) -> str | None:
        """The accelerator that was named, or that the plan is for; None: the CPU."""
        planned = None if self.plan is None else self.plan.accelerator
        return planned if self.accelerator is None else self.accelerator

    def kept_as(self) -> KeptAs:
        """What keys and values are kept as; None: the type of the weights.

        Raises
        ------
        ConfigError
            It is a type that nothing is kept as.
        """
        planned = None if self.plan is None else self.plan.kv_dtype or None
        return kept_as(planned if self.kv_dtype is None else self.kv_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateReport(RunReport):
    """Result of :func:`run`.

    Attributes
    ----------
    tokens
        int64.
    calls
        Who computed attention.
    predicted_tokens_per_s
        By the plan, of a process alone; None: there was none.
    placement_notes
        Where a place differs from its policy, and why, by kind.
    speed_notes
        What else has to be known of its speed.
    ranks
        Processes that divided the run; bytes and calls are of all of them.
    prefixes
        What was found and kept of the prompts' beginnings; None: they are not kept.
    accelerator
        What computed, with its number; None: the CPU.
    trace
        For :func:`cxl_offload.sim.replay`; empty where nothing was recorded.
    """

    tokens: torch.Tensor
    calls: AttentionCalls
    predicted_tokens_per_s: float | None = None
    placement_notes: tuple[str, ...] = ()
    speed_notes: tuple[str, ...] = ()
    ranks: int = 1
    prefixes: PrefixCounts | None = None
    accelerator: str | None = None
    trace: Trace = field(default_factory=Trace)

    def to_json(self) -> dict[str, Any]:
        """All of it but the trace, ready for ``json.dumps``."""
        return {
            **super(GenerateReport, self).to_json(),
            "ranks": self.ranks,
            "accelerator": self.accelerator,
            "placement_notes": list(self.placement_notes),
            "speed_notes": list(self.speed_notes),
            "predicted": {"tokens_per_s": self.predicted_tokens_per_s},
            "attention": {
                "kernel": self.calls.kernel,
                "joined": self.calls.joined,
                "accelerator": self.calls.accelerator,
                "prompt": self.calls.prompt,
                "own": dict(self.calls.own),
            },
            "prefixes": None if self.prefixes is None else self.prefixes.to_json(),
        }


def run(
    request: GenerateRun,
    *,
    session: Session | None = None,
    progress: Progress | None = None,
    part: RankPart = _ALONE,
) -> GenerateReport:
    """Load a model with its weights in place and generate with its KV cache in place.

    Parameters
    ----------
    session
        What allocates; None means the current session. A rank's is that of its share
        (:func:`cxl_offload.ranks.share_machine`), or together they take more than a node has.
    part
        What this process does where the ranks of a ``torch.distributed`` group divide the run; all
        of them call, and every report is of all. The default is a process alone.

    Raises
    ------
    ConfigError, MemoryError
        In one line, before the model is loaded: an unknown kind, tier or node, a model against the
        conventions, prompts too long for it, nodes too small.
    """
    session = session or current_session()
    with part.agreed():
        linear_rows = rows_by(request.cpu_linear, request.computes_on)
        ready = _load(request, session, part)
    clock = TokenClock(request.gen_len, progress)
    kept, whole = request.kept_as(), request.whole_sequences
    kv = KvMemory(ready.store, kept, whole_sequences=whole, accelerator=ready.kv_there)
    # Ranks that divide tensors wait for each other in every layer: none can tell the others there.
    alone = part.agreed() if part.divided == "rows" else contextlib.nullcontext()
    offloaded = Offloaded(
        ready.model,
        ready.store,
        kv=kv,
        linear_rows=linear_rows,
        rows_at_once=ready.rows_at_once,
        open_prefixes=checked_prefixes(ready.model, request.prefixes, kv, session),
        threads=(threads := planned_threads(request.plan, session)).counts,
        device=ready.device,
        tuning=ready.tuning,
    )
    recorder = recorder_for(session, ready.device, offloaded.calls, ready.rows_at_once)
    given = Prompts(inputs=ready.inputs, pad=ready.tokenizer.pad_token_id, stop=request.stop)
    with alone, offloaded as done:
        if request.warmup:
            given.answered_by(ready.model, 1)
            done.calls.forget()
        with recorder.following(ready.model, wanted=request.record), share_cpus() as shared:
            clock.start()
            tokens = given.answered_by(ready.model, request.gen_len, clock)
    report = _report(request, session, ready, tokens.cpu(), clock.times, done.calls, shared)
    notes = (*report.placement_notes, *threads.notes)
    report = replace(report, prefixes=done.prefixes, placement_notes=notes, trace=recorder.trace)
    return report_of_all(report, part, ready.tokenizer.pad_token_id or 0)


@dataclass(frozen=True, slots=True)
class _Ready:
    """What a process generates with, and how long that took to load."""

    model: Any
    store: TierStore
    inputs: Mapping[str, torch.Tensor]
    tokenizer: Any
    rows_at_once: int | None
    load: LoadClock
    device: ModelDevice | None
    kv_there: AcceleratorKv | None
    tuning: ModelTuning | None


def _load(request: GenerateRun, session: Session, part: RankPart) -> _Ready:
    """Everything is checked before the model is loaded."""
    asked = planned_for(len(request.prompts), request.plan)
    request.kept_as()  # refuses what nothing is kept as
    check_options(request)
    split = split_for(request.computes_on, {**asked.policies, **request.place})
    rows_at_once = check_rows_at_once(request, asked, split)
    device = _device(request, session, part, split)
    policies = chosen_policies(split.on_host, session, on_accelerator=device is not None)
    check_whole_sequences(request, policies)
    check_checkpoint(request.model)
    dtype = weights_as(request.dtype, request.plan)
    described = meta_model(request.model, dtype, request.attention)
    inputs, tokenizer = tokenized(Path(request.tokenizer or request.model), request.prompts)
    mine = part.rows(inputs["input_ids"].shape[0])
    inputs = {name: given[mine] for name, given in inputs.items()}
    share = split.kv if request.accelerator_kv is None else request.accelerator_kv
    there = accelerator_kv(share or 0.0, None if device is None else device.device, policies)
    store = store_for(policies, session, pin=device is not None, shares=split.layers)
    places = RunPlaces(
        session=session,
        policies=policies,
        store=store,
        device=device,
        kv_there=there,
        rows_at_once=rows_at_once,
    )
    check_before_loading(request, described, places, part, inputs["input_ids"])
    tuning = request.tuning.checked(session, store, part)
    with LoadClock() as clock:
        model = load(
            request.model,
            {},
            dtype=dtype,
            attention=request.attention,
            distributed=part.distributed(),
            store=store,
        )
    return _Ready(model, store, inputs, tokenizer, rows_at_once, clock, device, there, tuning)


def _device(
    request: GenerateRun, session: Session, part: RankPart, split: SplitPolicies
) -> ModelDevice | None:
    check_alone(request, part)
    if request.computes_on is None:
        return None
    ModelDevice.refuse(tune=request.tuning.signal, prefixes=request.prefixes)
    return ModelDevice(chosen_device(request.computes_on, request.plan), session, split.layers)


def _report(
    request: GenerateRun,
    session: Session,
    ready: _Ready,
    tokens: torch.Tensor,
    times: Sequence[float],
    calls: AttentionCalls,
    shared: SharedCpus,
) -> GenerateReport:
    prompt_len = ready.inputs["input_ids"].shape[1]
    new, store = tokens[:, prompt_len:], ready.store
    return GenerateReport(
        model=Path(request.model).name,
        parameters=sum(weight.numel() for weight in ready.model.parameters()),
        machine=session.machine.name,
        simulated_placement=session.is_simulated,
        tokens=tokens,
        answers=tuple(ready.tokenizer.batch_decode(new, skip_special_tokens=True)),
        prompt_len=prompt_len,
        gen_len=new.shape[1],
        load_seconds=ready.load.seconds,
        load_parts=ready.load.parts,
        prefill_seconds=times[1] - times[0],
        decode_seconds=times[-1] - times[1],
        placement=(
            *placement_rows(store.use(), store.parts, session.machine),
            *(() if ready.kv_there is None else (ready.kv_there.row(),)),
        ),
        placement_notes=store.notes(),
        speed_notes=shared.notes(),
        calls=calls,
        accelerator=None if ready.device is None else str(ready.device),
        predicted_tokens_per_s=None if request.plan is None else request.plan.tokens_per_s,
    )
