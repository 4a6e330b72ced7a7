"""Weights in tiers by kind: moved where they stand, or loaded straight to their place."""

from __future__ import annotations

import logging
import os
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
)
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import Shard
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.bitsandbytes_weights import (
    codes_beside,
    held_by_bitsandbytes,
    is_of_bitsandbytes,
    settle_layers,
    share_codes,
)
from cxl_offload.integrations.transformers.checkpoint import ModelFiles, auto_class
from cxl_offload.integrations.transformers.config_checks import described_by, warnings_kept
from cxl_offload.integrations.transformers.kinds import (
    EXPERTS,
    kind_of_weight,
    named_experts,
)
from cxl_offload.integrations.transformers.layer_shares import LayerShares
from cxl_offload.integrations.transformers.least_bytes import least_bytes
from cxl_offload.integrations.transformers.weight_files import FileWeights, folder_of
from cxl_offload.integrations.transformers.weight_reads import reads_of_weights, start_filling
from cxl_offload.memory import Policy, Session
from cxl_offload.objects.experts import (
    expert_numbers,
    expert_parts,
    number_of_expert,
    runs_of,
    stacked_experts,
)
from cxl_offload.objects.kind_store import MemorySource, Part, TierStore
from cxl_offload.objects.weight_kinds import KINDS as WEIGHT_KINDS
from cxl_offload.tensor_bytes import held_tensors
from cxl_offload.transfer.file_reads import FileReads

_loaded_by: MutableMapping[torch.Tensor, tuple[Part, ...]] = WeakIdKeyDictionary()
"""Weights that were loaded to their place, to its policies: they need no moving there."""
_log = logging.getLogger(__name__)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class ModelStore(TierStore):
    """A store of a model's weights, of which those of some layers stay on an accelerator.

    Parameters
    ----------
    shares
        Of the layers, by kind.
    """

    def __init__(
        self,
        source: MemorySource,
        parts: Mapping[str, tuple[Part, ...]],
        *,
        pin: bool,
        shares: LayerShares,
    ) -> None:
        super().__init__(source, parts, pin=pin)
        self.shares = shares


def staying(store: TierStore, model: torch.nn.Module) -> frozenset[str]:
    """Names of the weights that have no place in a tier, though their kind has."""
    return store.shares.names(model) if isinstance(store, ModelStore) else frozenset()


class _Owner:
    """Whom bytes are counted for while a parameter's memory is in a tier."""


def store_for(
    policies: Mapping[str, Policy],
    session: Session,
    *,
    pin: bool = False,
    shares: LayerShares | None = None,
) -> TierStore:
    """A store with the policy of every kind; experts with one of their own are parts of theirs.

    ``pin``: weights lie pinned, for copies to an accelerator. ``shares``: those of some layers
    have no place here.
    """
    parts: dict[str, tuple[Part, ...]] = {
        kind: (Part("host", policy),)
        for kind, policy in policies.items()
        if not kind.startswith(EXPERTS)
    }
    for kind, policy in policies.items():
        if kind.startswith(EXPERTS):
            parts["experts"] += (Part(kind[len(EXPERTS) :], policy),)
    return ModelStore(MemorySource(session), parts, pin=pin, shares=shares or LayerShares())


def empty_in_place(
    store: TierStore, kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[int, torch.Tensor]:
    """Memory of a weight in its place, and the part of its kind that it is counted for.

    A stack of experts is allocated as one, and those with a policy of their own are moved before
    anything is written, by whole pages.

    Raises
    ------
    ConfigError
        An expert that the stack does not have is placed.
    """
    part = 0
    named = [expert_numbers(each.name) for each in store.parts[kind][1:]]
    number = number_of_expert(name)
    for at, experts in enumerate(named, 1):
        part = at if number in experts else part
    made = store.empty(kind, part, shape, dtype, pin=True)
    stacked = stacked_experts(name, shape)
    for at, experts in enumerate(named, 1):
        if stacked and max(experts) >= stacked:
            raise ConfigError(
                f"kind {EXPERTS}{store.parts[kind][at].name}: {name} has experts 0 to {stacked - 1}"
            )
        for first, end in runs_of(experts) if stacked else ():
            store.move_slice(kind, at, made[first:end])
    return part, made


def placed(
    store: TierStore, kind: str, name: str, weight: torch.Tensor, reads: FileReads | None = None
) -> tuple[int, torch.Tensor]:
    """A copy of a weight in its place, and its part; as :func:`empty_in_place`.

    With ``reads`` its elements are there when they were waited for.
    """
    part, made = empty_in_place(store, kind, name, tuple(weight.shape), weight.dtype)
    if reads is not None:
        start_filling(reads, made, weight)
    else:
        with reads_of_weights() as reads:
            start_filling(reads, made, weight)
            reads.wait()
    return part, made


def refuse_numbers(store: TierStore, kind: str, name: str, weight: torch.Tensor) -> None:
    """Experts have numbers only in a process that has all of a stack."""
    placements = getattr(weight, "placements", ())
    sharded = any(isinstance(each, Shard) and not each.dim for each in placements)
    if sharded and weight.dim() == 3 and len(store.parts[kind]) > 1:
        raise ConfigError(
            f"kind {EXPERTS}{store.parts[kind][1].name}: the experts of {name} are divided among "
            "ranks; give a policy of experts for all"
        )


def is_plain(tensor: torch.Tensor) -> bool:
    """Bytes that are no more than what they say: no subclass, on the CPU, and there."""
    return (
        type(tensor) in _PLAIN
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    )


def _to_place(weight: torch.Tensor) -> list[torch.Tensor]:
    """What holds a weight's bytes and can be given other memory.

    Inside of a quantized tensor strides may mean something, so what has odd ones stays.
    """
    if is_of_bitsandbytes(weight):
        return [held for held in held_by_bitsandbytes(weight) if held.numel() and held.is_cpu]
    any_strides = type(weight) in _PLAIN or hasattr(weight, "to_local")
    return [
        held
        for held in held_tensors(weight)
        if held.numel() and is_plain(held) and (any_strides or held.is_contiguous())
    ]


def place_held(
    store: TierStore, kind: str, name: str, weight: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor]]:
    """Give what holds a weight's bytes memory in its place, one after another: part and tensor."""
    refuse_numbers(store, kind, name, weight)
    for held in _to_place(weight):
        part, held.data = placed(store, kind, name, held.data)
        yield part, held
    share_codes(weight)


def named_weights(model: torch.nn.Module, before: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and the buffers that are saved with them: some quantizers keep weights there.

    ``before`` is put before their names.
    """
    for name, weight in model.named_parameters():
        yield before + name, weight
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield before + name, buffer


def note_missing_kinds(model: torch.nn.Module, asked: Iterable[str]) -> None:
    """Warn of policies for kinds of weights that a model has none of, such as experts."""
    tied = getattr(model, "all_tied_weights_keys", {})
    there = dict.fromkeys(kind_of_weight(name, tied) for name, _ in named_weights(model))
    for kind in asked:
        if kind.partition(":")[0] in WEIGHT_KINDS and kind.partition(":")[0] not in there:
            name = type(model).__name__
            _log.warning("policy of %s: %s has only %s", kind, name, ", ".join(there))


def place_weights(model: PreTrainedModel, store: TierStore) -> Callable[[], None]:
    """Move a model's weights where the policies of their kinds say, one after another.

    Parameters
    ----------
    store
        Policies of kinds; weights of a kind without one, on an accelerator, or loaded to that
        place by :func:`load`, stay where they are. Of a weight divided among ranks this rank's
        part is moved, of a quantized one what it holds. Buffers that checkpoints have are weights.

    Returns
    -------
    callable
        Moves them back to ordinary memory. In a child that was forked since then they stay where
        they are, in memory of its own: torch's copies wait there for threads that it has not.

    Raises
    ------
    MemoryError
        A node has no room; the weights are back in ordinary memory.
    """
    tied = getattr(model, "all_tied_weights_keys", {})
    moved: dict[torch.Tensor, _Owner] = {}
    folder, stays = folder_of(model), staying(store, model)
    files = None if folder is None else FileWeights(folder)

    shared: list[tuple[torch.Tensor, torch.Tensor]] = []
    process = os.getpid()

    def back() -> None:
        if files is not None:
            files.forget()
        for held in moved if os.getpid() == process else ():
            held.data = torch.empty_like(held.data).copy_(held.data)
        for weight, codes in shared:
            weight.data = codes.data
        moved.clear()
        shared.clear()

    try:
        if not store.parts.keys().isdisjoint(WEIGHT_KINDS):
            settle_layers(model)
        for name, weight in named_weights(model):
            kind = kind_of_weight(name, tied)
            if kind not in store.parts or name in stays or _is_there(store, kind, weight):
                continue
            _loaded_by.pop(weight, None)
            if (codes := codes_beside(weight)) is not None:
                shared.append((weight, codes))
            for part, held in place_held(store, kind, name, weight):
                moved[held] = owner = _Owner()
                if files is not None:
                    files.add(name, held)
                store.count(owner, kind, part, held.data)
    except BaseException:
        back()
        raise
    return back


def set_loaded(weight: torch.Tensor, parts: tuple[Part, ...]) -> None:
    """Remember that a weight was loaded to the place that a kind's policies say."""
    _loaded_by[weight] = parts


def was_loaded(weight: torch.Tensor, parts: tuple[Part, ...]) -> bool:
    """Whether a weight was loaded to such a place; it may have been moved since."""
    return _loaded_by.get(weight) == parts


def _is_there(store: TierStore, kind: str, weight: torch.Tensor) -> bool:
    """Whether a weight was loaded to where its kind is to lie."""
    return was_loaded(weight, store.parts[kind]) and store.lies_pinned(weight)


def meta_model(
    folder: str | Path, dtype: torch.dtype | str = "auto", attention: str | None = None
) -> PreTrainedModel:
    """The model of a checkpoint without its weights; nothing is loaded.

    Raises
    ------
    ConfigError
        No decoder that transformers knows.
    """
    if isinstance(dtype, str) and dtype != "auto":
        named = getattr(torch, dtype, None)
        if not isinstance(named, torch.dtype):
            raise ConfigError(f"dtype {dtype}: give auto or a type of torch, such as bfloat16")
        dtype = named
    found = ModelFiles.at(folder)
    dtype = found.dtype(dtype)
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    said_in = found.described_in if attention is None else found.path
    with warnings_kept():
        config = found.config()
        with described_by(said_in), torch.device("meta"):
            chosen = config.dtype if dtype == "auto" else dtype
            return auto_class(config).from_config(config, dtype=chosen, **options)


def weight_bytes(
    model: PreTrainedModel,
    kinds: Collection[str] = (),
    folder: str | Path | None = None,
    *,
    without: Collection[str] = (),
) -> dict[str, int]:
    """Bytes of every kind of weight of a model, which may be without its weights.

    Those of names in ``without`` are left out. Of a quantized checkpoint what the headers of its
    files in ``folder`` say, which is the least: only loading it tells what transformers makes of
    them. Experts that ``kinds`` name by number are counted there and not with the others; of a
    quantized checkpoint they are not counted.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        least = {} if folder is None else least_bytes(model, ModelFiles.at(folder).folder)
        if any(named_experts(kind) is not None for kind in kinds):
            least.pop("experts", None)
        return least
    found = dict.fromkeys(WEIGHT_KINDS, 0)
    tied = getattr(model, "all_tied_weights_keys", {})
    for name, weight in named_weights(model):
        if name not in without:
            found[kind_of_weight(name, tied)] += weight.nbytes
    for kind in kinds:
        experts = named_experts(kind)
        if experts is not None:
            parts = (part for part in expert_parts(model) if part.expert in experts)
            found[kind] = sum(part.weight.nbytes for part in parts)
            found["experts"] -= found[kind]
    return {kind: count for kind, count in found.items() if count}
