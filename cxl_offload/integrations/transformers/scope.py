"""``offload``: a model's KV cache in tiers for the length of a ``with`` block."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel

from cxl_offload.errors import ConfigError, forget_locals
from cxl_offload.integrations.planned_threads import planned_threads
from cxl_offload.integrations.transformers.accelerator_kv import accelerator_kv as kv_there
from cxl_offload.integrations.transformers.again import take_generate
from cxl_offload.integrations.transformers.attention import (
    FEW_QUERIES,
    AttentionCalls,
    BlockAttention,
    ThreadsOfAStep,
    registered_name,
    take_part,
)
from cxl_offload.integrations.transformers.beside_layers import take_beside_layers
from cxl_offload.integrations.transformers.cache_giver import cache_giver
from cxl_offload.integrations.transformers.cache_room import tell_room
from cxl_offload.integrations.transformers.checkpoint import check_final_weights
from cxl_offload.integrations.transformers.compute_device import chosen_device
from cxl_offload.integrations.transformers.conventions import (
    base_model,
    check_conventions,
    own_attention,
    text_config,
)
from cxl_offload.integrations.transformers.kinds import check_kept, chosen_policies
from cxl_offload.integrations.transformers.layer_shares import split_for
from cxl_offload.integrations.transformers.linear_layers import Fastest, rows_of_linear_layers
from cxl_offload.integrations.transformers.model_device import ModelDevice
from cxl_offload.integrations.transformers.near_caches import check_room
from cxl_offload.integrations.transformers.norm_layers import take_kernel_layers
from cxl_offload.integrations.transformers.plain_copies import PlainCopies
from cxl_offload.integrations.transformers.plans import Asked, asked_of
from cxl_offload.integrations.transformers.prefix_options import KeptPrefixes, PrefixCounts
from cxl_offload.integrations.transformers.prefixes import PrefixReuse, checked_prefixes
from cxl_offload.integrations.transformers.room import KeptAs, KvMemory
from cxl_offload.integrations.transformers.row_parts import check_rows, take_layers
from cxl_offload.integrations.transformers.streamed_states import StateStream
from cxl_offload.integrations.transformers.streamed_weights import WeightStream
from cxl_offload.integrations.transformers.tuning import ModelTuning, TunedModel, refuse_copies
from cxl_offload.integrations.transformers.weights import (
    note_missing_kinds,
    place_weights,
    store_for,
)
from cxl_offload.integrations.undisturbed import undisturbed
from cxl_offload.memory import Session, current_session
from cxl_offload.objects.kind_store import MemorySource, TierStore
from cxl_offload.objects.placement_rows import PlacementRow, placement_rows
from cxl_offload.ops.shared_cpus import share_cpus
from cxl_offload.renamed import renamed_keywords
from cxl_offload.tune import Signal

_log = logging.getLogger(__name__)


# Long, with many parameters: by keyword only, each with a default; a line for each.
@renamed_keywords(hot_expert_bytes="near_expert_bytes", hot_kv_bytes="near_kv_bytes")
def offload(
    model: PreTrainedModel,
    policies: Asked,
    *,
    kv_dtype: KeptAs = None,
    linear_rows: int | Fastest | None = None,
    few_queries: int = FEW_QUERIES,
    rows_at_once: int | None = None,
    whole_sequences: bool = False,
    prefixes: KeptPrefixes | None = None,
    session: Session | None = None,
    accelerator: str | torch.device | None = None,
    accelerator_kv: float | None = None,
    tune: Signal | None = None,
    tune_budget_bytes: int = 0,
    tune_state: str | Path | None = None,
    tune_threads: Sequence[int] = (),
    near_expert_bytes: int = 0,
    near_kv_bytes: int = 0,
) -> Offloaded:
    """Put the KV cache and the weights of a model in tiers while a ``with`` block lasts.

    Inside of the block ``model.generate()`` and ``model()`` use caches whose keys and values are
    where ``policies["kv"]`` says, and decode by the package's kernel over them where they lie.
    Prompts, and what the kernel does not compute, are attended to by the model's own attention.
    When the block ends the model is as before, its weights back in ordinary memory; a cache that
    the caller keeps stays valid. ``copy.deepcopy(model)`` in the block makes a model as it was
    before the block, in ordinary memory.

    Parameters
    ----------
    model
        A decoder of transformers, with its head, in eval mode; or one that PEFT wraps, which
        generates in the block as before.
    policies
        A plan for transformers (``cxl-offload plan inference --executor transformers``), its file,
        or kind of tensor to policy. Kinds are ``kv``, ``activations``, ``attention``, ``mlp``,
        ``experts``, ``norm``, ``embedding``, ``head``, ``other``, and ``weights`` for all of
        weights that are not named. What is missing stays where it is.
    kv_dtype
        ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``: keys and values are kept as these, in half
        the room, and decoding attends to them as they are. ``"int4"``: as 4-bit codes in groups of
        64, FlexGen's sizes, in 0.28 of the room of two bytes. None: what the plan says, or in their
        own type.
    linear_rows
        Linear layers of up to so many rows (sequences, when decoding) are computed by
        :func:`cxl_offload.ops.linear.linear`; 0: all by torch. Where that is faster depends on
        the processor: ``"fastest"`` measures it in the first call of every shape, of more than 64
        rows by a part of the layer, and results may then differ in their last bits from run to run.
        None: 64 where weights have copies (``replicate:0,1``), which torch would not read, else 0.
    few_queries
        Up to so many tokens a sequence that come at once after the prompt, as drafted ones do, are
        attended to by the kernel; more, as a long turn of a chat, by the model's own attention.
    rows_at_once
        Sequences that a decoder layer computes at once: it goes through a larger batch in parts,
        before the next layer begins (a block schedule), so that activations inside of a layer are
        those of so many rows. Hidden states between layers are of all rows, in the tier of
        ``activations``, from where an accelerator copies those that it computes. None: what the
        plan says, or the whole batch.
    whole_sequences
        With a policy of ``kv`` that stripes, every sequence's keys, and values, of a layer lie on
        one node: weights share out sequences. False: they share out granules of each.
    prefixes
        Where the KV of prompts' beginnings is kept, so that a later ``generate()`` with the same
        beginning, or the next process, computes only the rest. None: every prompt is computed.
    session
        What allocates; None means the current session.
    accelerator
        ``"cuda"`` or ``"cuda:0"``: the model computes there. Weights with a policy lie in pinned
        memory of their tiers and are copied a decoder layer ahead of their use; embeddings are
        looked up where they lie. Weights without a policy, or of policy ``"gpu"``, are on the
        accelerator while the block lasts; of policy ``"gpu:0.25,cxl"`` those of a quarter of the
        layers. None: what the plan says, else each weight computes where it is.
    accelerator_kv
        Share of the positions of every layer's cache, the first ones, that lies on the accelerator;
        the rest is where ``policies["kv"]`` says. A decode step attends to both parts at once, each
        where it lies, and joins them by their log-sum-exp. None: that of a policy of ``kv`` such as
        ``"gpu:0.25,cxl"``, as plans have it, else 0.
    tune
        ``"step_time"``: the share of the placed weights on the far tier (CXL, else the other
        sockets) follows the time of the decode steps, see docs/tuning.md. ``"phase_time"``: prefill
        and decode have a share each, where moving between them pays. None: they stay.
    tune_budget_bytes
        Bytes that may move between two forward passes, in the mean; 0 only logs advice.
    tune_state
        A JSON file that lets a restart go on. That of experts is beside it, ``NAME.experts``.
    tune_threads
        With ``tune="phase_time"``: numbers of torch's threads that prefill and decode try; each
        takes the fewest that are not slower. Other numbers may round otherwise. Empty: they stay.
    near_expert_bytes
        Room on the near tier for experts that are asked for often; the others stay where
        ``policies["experts"]`` says, which is the far tier. They move within the same budget.
    near_kv_bytes
        Room on the near tier for the KV caches that are used next; those of conversations that wait
        are where ``policies["kv"]`` says, the far tier. They move within the same budget.

    Returns
    -------
    Offloaded
        The context manager; in the block it also says what was done.

    Raises
    ------
    ConfigError
        In one line: an unknown kind or tier, a plan for another executor, a model that does not
        follow transformers' conventions, or an accelerator that is not there or too small.
    """
    session = session or current_session()
    model = base_model(model)
    asked = asked_of(policies)
    accelerator = asked.accelerator if accelerator is None else accelerator
    split, device = split_for(accelerator, asked.policies), None
    if accelerator is not None:
        device = ModelDevice(chosen_device(accelerator, asked.plan), session, split.layers)
        device.refuse(tune=tune, near_expert_bytes=near_expert_bytes, prefixes=prefixes)
    store = store_for(
        chosen_policies(split.on_host, session, on_accelerator=device is not None),
        session,
        pin=device is not None,
        shares=split.layers,
    )
    rows_at_once = asked.rows_at_once if rows_at_once is None else rows_at_once
    check_conventions(model)
    if device is not None:
        device.check(model, store.parts, rows_at_once)
    check_room(near_kv_bytes, store.parts)
    tuning = ModelTuning.read(
        session,
        tune=tune,
        budget_bytes=tune_budget_bytes,
        state=tune_state,
        threads=tune_threads,
        near_expert_bytes=near_expert_bytes,
        near_kv_bytes=near_kv_bytes,
    )
    share = split.kv if accelerator_kv is None else accelerator_kv
    there = kv_there(share or 0.0, None if device is None else device.device, store.parts)
    kept = kv_dtype or asked.kv_dtype
    check_kept(kv_dtype, store.parts)
    kv = KvMemory(store, kept, whole_sequences=whole_sequences, accelerator=there)
    if asked.plan is None:
        note_missing_kinds(model, asked.policies)
    threads = planned_threads(asked.plan, session)
    for note in threads.notes:
        _log.warning("%s", note)
    return Offloaded(
        model,
        store,
        kv=kv,
        linear_rows=linear_rows,
        few_queries=few_queries,
        rows_at_once=rows_at_once,
        open_prefixes=checked_prefixes(model, prefixes, kv, session),
        tuning=tuning,
        device=device,
        threads=threads.counts,
    )


class Offloaded:
    """A model whose KV cache and weights are in tiers, inside of the ``with`` block.

    Attributes
    ----------
    linear_rows, rows_at_once
        As asked.
    store
        Counts the bytes of every kind.
    tuned
        What follows the steps in the block; None without ``tune`` and ``near_expert_bytes``.
    streamed, streamed_states
        What gives layers their weights on the accelerator, and their hidden states where these
        have a tier; None without.
    """

    # Many parameters: by keyword only, each with a default.
    def __init__(
        self,
        model: PreTrainedModel,
        store: TierStore,
        *,
        kv: KvMemory | None = None,
        linear_rows: int | Fastest | None = None,
        few_queries: int = FEW_QUERIES,
        rows_at_once: int | None = None,
        open_prefixes: Callable[[], PrefixReuse] | None = None,
        tuning: ModelTuning | None = None,
        device: ModelDevice | None = None,
        threads: Mapping[int, int] | None = None,
    ) -> None:
        self.linear_rows = rows_of_linear_layers(linear_rows, store)
        refuse_copies(store, tuning)
        if not isinstance(few_queries, int) or few_queries < 1:
            raise ConfigError(f"few_queries {few_queries!r}: a whole number of at least 1")
        check_rows(rows_at_once, store, model, streamed=device is not None)
        self.model = model
        self.rows_at_once = rows_at_once
        self.store = store
        self._attention = BlockAttention(few_queries, threads)
        self.tuned: TunedModel | None = None
        self._tuning = tuning
        self._device = device
        self.streamed: WeightStream | None = None
        self.streamed_states: StateStream | None = None
        self._kv = kv or KvMemory(store)
        self._open_prefixes = open_prefixes
        self._reuse: PrefixReuse | None = None
        self._attention_before: str | None = None
        self._open: contextlib.ExitStack | None = None

    def __repr__(self) -> str:
        policies = ", ".join(
            f"{kind}: {part.policy}" for kind, parts in self.store.parts.items() for part in parts
        )
        where = "in its block" if self._open is not None else "outside of its block"
        return f"<{type(self.model).__name__} offloaded, {where}: {policies}>"

    @property
    def placement(self) -> tuple[PlacementRow, ...]:
        """Bytes of every kind at their peak, requested against granted: a line each as text."""
        source = self.store.source
        session = source.session if isinstance(source, MemorySource) else current_session()
        on_device = self._kv.accelerator
        rows = placement_rows(self.store.use(), self.store.parts, session.machine)
        return rows if on_device is None else (*rows, on_device.row())

    @property
    def calls(self) -> AttentionCalls:
        """Who computed attention how often, since the block began."""
        return self._attention.calls

    @property
    def accelerator_kv_bytes(self) -> int:
        """The most that keys and values took on the accelerator."""
        return 0 if self._kv.accelerator is None else self._kv.accelerator.use.peak_bytes

    @property
    def prefixes(self) -> PrefixCounts | None:
        """What was found and kept of prompts' beginnings; None: they are not kept."""
        return None if self._reuse is None else self._reuse.counts

    def __enter__(self) -> Offloaded:
        check_conventions(self.model)  # again: another block may have begun since
        check_final_weights(self.model, self.store.parts)
        if self._device is not None:
            self._device.check(self.model, self.store.parts, self.rows_at_once)
        # Weights that are moved under torch.inference_mode() could never be trained again.
        with torch.inference_mode(False), contextlib.ExitStack() as stack:
            copies = PlainCopies(self.model)
            stack.callback(place_weights(self.model, self.store))
            if self._device is not None:
                self.streamed, self.streamed_states = self._device.take(
                    self.model, self.store, self.rows_at_once, stack
                )
            self._before_every_step(stack, ThreadsOfAStep(self._attention))
            if self.linear_rows:
                take_kernel_layers(self.model, self.linear_rows, self._attention, self.store, stack)
            if self.rows_at_once is not None:
                states = self.streamed_states
                take_layers(self.model, self.rows_at_once, self._kv, stack, states)
                if states is not None:
                    take_beside_layers(self.model, states, stack)
            if self._open_prefixes is not None:
                self._reuse = self._open_prefixes()
                stack.callback(self._reuse.close)
                self._reuse.take(self.model, stack)
            if "kv" in self.store.parts:
                self._take_attention(stack)
                stack.callback(take_part, self.model, None)
                take_part(self.model, self._attention)
                self._before_every_step(stack, cache_giver(self._kv))
                tell_room(self.model, self._kv, stack)
            take_generate(self.model, stack)
            stack.enter_context(share_cpus())
            if self._tuning is not None:
                self.tuned = stack.enter_context(self._tuning.following(self.model))
            self._make_copies_plain(copies, stack)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            forget_locals(error)
        try:
            with undisturbed(), torch.inference_mode(False):
                self._close()
        finally:
            self._close()  # Ctrl-C was faster

    def _close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()

    def _before_every_step(self, stack: contextlib.ExitStack, hook: Callable[..., Any]) -> None:
        removable = self.model.register_forward_pre_hook(hook, with_kwargs=True)
        stack.callback(removable.remove)

    def _make_copies_plain(self, copies: PlainCopies, stack: contextlib.ExitStack) -> None:
        device, before = self._device, self._attention_before
        why_not = (
            ""
            if device is None
            else f"its weights are on their way to {device.device}; copy it before or after"
        )

        def restore(copied: PreTrainedModel) -> None:
            if before is not None:
                ask_for_attention(copied, before)

        copies.begin(stack, restore, why_not)

    def _take_attention(self, stack: contextlib.ExitStack) -> None:
        self._attention_before = before = text_config(self.model)._attn_implementation
        # Before it is done, since Ctrl-C may come in between.
        stack.callback(ask_for_attention, self.model, before)
        ask_for_attention(self.model, registered_name(own_attention(self.model)))


def ask_for_attention(model: PreTrainedModel, name: str) -> None:
    """Let the decoder of a model compute attention by what is registered under a name."""
    config, all_of_it = text_config(model), model.config
    parts = (part for part in all_of_it.sub_configs if getattr(all_of_it, part) is config)
    model.set_attn_implementation({next(parts, ""): name})
