"""Weights in tiers by kind: moved where they stand, or loaded straight to their place."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import Shard
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoModelForCausalLM, PreTrainedModel, core_model_loading
from transformers.distributed import DistributedConfig

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.checkpoint import (
    ModelFiles,
    check_placeable,
)
from cxl_offload.integrations.transformers.kinds import (
    EXPERTS,
    chosen_policies,
    kind_of_weight,
    named_experts,
)
from cxl_offload.integrations.transformers.plans import Asked, asked_of
from cxl_offload.integrations.transformers.read_errors import unloadable, unreadable
from cxl_offload.integrations.transformers.weight_files import FileWeights, folder_of
from cxl_offload.integrations.transformers.weight_reads import filled
from cxl_offload.memory import Policy, Session, current_session
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

_SETTER = "set_param_for_module"
_SETTER_PARAMETERS = ["model", "target_name", "param_value", "loading_info", "hf_quantizer"]
_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"
_one_load = threading.Lock()
_loaded_by: MutableMapping[torch.Tensor, tuple[Part, ...]] = WeakIdKeyDictionary()
"""Weights that were loaded to their place, to its policies: they need no moving there."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_log = logging.getLogger(__name__)


class _Owner:
    """Whom bytes are counted for while a parameter's memory is in a tier."""


def store_for(policies: Mapping[str, Policy], session: Session, *, pin: bool = False) -> TierStore:
    """A store with the policy of every kind; experts with one of their own are parts of theirs.

    ``pin``: weights lie pinned, for copies to an accelerator.
    """
    parts: dict[str, tuple[Part, ...]] = {
        kind: (Part("host", policy),)
        for kind, policy in policies.items()
        if not kind.startswith(EXPERTS)
    }
    for kind, policy in policies.items():
        if kind.startswith(EXPERTS):
            parts["experts"] += (Part(kind[len(EXPERTS) :], policy),)
    return TierStore(MemorySource(session), parts, pin=pin)


def _placed(
    store: TierStore, kind: str, name: str, weight: torch.Tensor
) -> tuple[int, torch.Tensor]:
    """A copy of a weight in its place, and the part of its kind that it is counted for.

    A stack of experts is allocated as one, and those with a policy of their own are moved before
    anything is written, by whole pages.

    Raises
    ------
    ConfigError
        An expert that the stack does not have is placed.
    """
    shape, part = tuple(weight.shape), 0
    named = [expert_numbers(each.name) for each in store.parts[kind][1:]]
    number = number_of_expert(name)
    for at, experts in enumerate(named, 1):
        part = at if number in experts else part
    made = store.empty(kind, part, shape, weight.dtype, pin=True)
    stacked = stacked_experts(name, shape)
    for at, experts in enumerate(named, 1):
        if stacked and max(experts) >= stacked:
            raise ConfigError(
                f"kind {EXPERTS}{store.parts[kind][at].name}: {name} has experts 0 to {stacked - 1}"
            )
        for first, end in runs_of(experts) if stacked else ():
            store.move_slice(kind, at, made[first:end])
    return part, filled(made, weight)


def _refuse_numbers(store: TierStore, kind: str, name: str, weight: torch.Tensor) -> None:
    """Experts have numbers only in a process that has all of a stack."""
    sharded = any(isinstance(each, Shard) and not each.dim for each in _placements(weight))
    if sharded and weight.dim() == 3 and len(store.parts[kind]) > 1:
        raise ConfigError(
            f"kind {EXPERTS}{store.parts[kind][1].name}: the experts of {name} are divided among "
            "ranks; give a policy of experts for all"
        )


def _placements(weight: torch.Tensor) -> tuple[Any, ...]:
    return tuple(getattr(weight, "placements", ()))


def _is_plain(tensor: torch.Tensor) -> bool:
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
    any_strides = type(weight) in _PLAIN or hasattr(weight, "to_local")
    return [
        held
        for held in held_tensors(weight)
        if held.numel() and _is_plain(held) and (any_strides or held.is_contiguous())
    ]


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and the buffers that are saved with them: some quantizers keep weights there."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


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
        Moves them back to ordinary memory.

    Raises
    ------
    MemoryError
        A node has no room; the weights are back in ordinary memory.
    """
    tied = getattr(model, "all_tied_weights_keys", {})
    moved: dict[torch.Tensor, _Owner] = {}
    folder = folder_of(model)
    files = None if folder is None else FileWeights(folder)

    def back() -> None:
        if files is not None:
            files.forget()
        for weight in moved:
            weight.data = torch.empty_like(weight.data).copy_(weight.data)
        moved.clear()

    try:
        for name, weight in named_weights(model):
            kind = kind_of_weight(name, tied)
            if kind not in store.parts or _is_there(store, kind, weight):
                continue
            _refuse_numbers(store, kind, name, weight)
            _loaded_by.pop(weight, None)
            for held in _to_place(weight):
                part, held.data = _placed(store, kind, name, held.data)
                moved[held] = owner = _Owner()
                if files is not None:
                    files.add(name, held)
                store.count(owner, kind, part, held.data)
    except BaseException:
        back()
        raise
    return back


def _is_there(store: TierStore, kind: str, weight: torch.Tensor) -> bool:
    """Whether a weight was loaded to where its kind is to lie."""
    return _loaded_by.get(weight) == store.parts[kind] and store.lies_pinned(weight)


def load(
    folder: str | Path,
    policies: Asked,
    *,
    dtype: torch.dtype | str = "auto",
    attention: str | None = None,
    distributed: DistributedConfig | None = None,
    session: Session | None = None,
    store: TierStore | None = None,
) -> PreTrainedModel:
    """Load a decoder with its weights straight into tiers, one weight at a time.

    No more than one weight, or one stack of experts with its parts, is in ordinary memory at a
    time, so that a model may be larger than the node that reads its file.

    Parameters
    ----------
    folder
        A checkpoint as transformers saves it, or a GGUF file. Nothing is downloaded. transformers
        dequantizes a GGUF file, and weights of compressed-tensors, in ordinary memory, where all of
        them are before they go to their place.
    policies
        A plan for transformers, its file, or kind of tensor to policy; a kind without one is loaded
        into ordinary memory.
    dtype
        Of the weights; ``"auto"`` is that of the checkpoint, and of a GGUF file float32.
    attention
        ``"eager"`` or ``"sdpa"``; None is the model's own choice.
    distributed
        How transformers divides weights among the ranks of a ``torch.distributed`` group, as
        ``DistributedConfig(tp_plan="auto")``: this rank's part goes to its place. None: not at all.
    session
        What allocates; None means the current session.
    store
        Counts the bytes by kind, if the caller wants to know; then it also has the policies.

    Returns
    -------
    PreTrainedModel
        In eval mode. Its weights stay in their tiers as long as it lives.

    Raises
    ------
    ConfigError
        No checkpoint there, one that is quantized in a way that transformers cannot load here, or
        an unknown kind, tier or node.
    MemoryError
        A node has no room; before anything is loaded where that can be known.
    """
    if store is None:
        session = session or current_session()
        store = store_for(chosen_policies(asked_of(policies).policies, session), session)
    found = ModelFiles.at(folder)
    config = found.config()
    check_placeable(config, store.parts)
    options = found.model_options(config)
    if attention is not None:
        options["attn_implementation"] = attention
    if distributed is not None:
        options["distributed_config"] = distributed
    files = FileWeights(found.folder)
    with _one_load, _setting_in(store, files), unloadable(found.path):
        model = AutoModelForCausalLM.from_pretrained(
            found.folder, dtype=found.dtype(dtype), **options
        )
    _place_late(model, store)
    weakref.finalize(model, files.forget).atexit = False
    return model.eval()


def _place_late(model: PreTrainedModel, store: TierStore) -> None:
    """Move what was made after the weights of the file were set: dequantized ones, one by one."""
    tied = getattr(model, "all_tied_weights_keys", {})
    for name, weight in named_weights(model):
        kind = kind_of_weight(name, tied)
        if kind in store.parts and _loaded_by.get(weight) != store.parts[kind]:
            _refuse_numbers(store, kind, name, weight)
            for held in _to_place(weight):
                part, held.data = _placed(store, kind, name, held.data)
                store.count(weight, kind, part, held)
            _loaded_by[weight] = store.parts[kind]


@contextlib.contextmanager
def _setting_in(store: TierStore, files: FileWeights) -> Iterator[None]:
    """Every weight that transformers sets goes to its place first; it has no hook for that."""
    stock = getattr(core_model_loading, _SETTER, None)
    if stock is None or list(inspect.signature(stock).parameters) != _SETTER_PARAMETERS:
        raise ConfigError(
            "this transformers sets weights in another way than 5.19, so they cannot be loaded to "
            "their place; load the model as usual and offload() moves its weights"
        )

    before = os.environ.get(_ONE_BY_ONE)
    os.environ[_ONE_BY_ONE] = "1"
    setattr(core_model_loading, _SETTER, _setter(stock, store, files))
    try:
        yield
    finally:
        setattr(core_model_loading, _SETTER, stock)
        if before is None:
            del os.environ[_ONE_BY_ONE]
        else:
            os.environ[_ONE_BY_ONE] = before


def _setter(
    stock: Callable[..., None], store: TierStore, files: FileWeights
) -> Callable[..., None]:
    """``stock``, with the weight in its place first."""
    names: dict[int, set[str]] = {}

    def set_in_place(
        model: Any, target_name: str, param_value: Any, loading_info: Any, hf_quantizer: Any
    ) -> None:
        kind = kind_of_weight(target_name, getattr(model, "all_tied_weights_keys", {}))
        if id(model) not in names:
            names[id(model)] = {name for name, _ in named_weights(model)}
        if target_name not in names[id(model)] or kind not in store.parts:
            stock(model, target_name, param_value, loading_info, hf_quantizer)
            return
        module_name, _, name = target_name.rpartition(".")
        module = model.get_submodule(module_name)
        _refuse_numbers(store, kind, target_name, getattr(module, name))
        part = 0
        if param_value.numel() and _is_plain(param_value):
            part, param_value = _placed(store, kind, target_name, param_value)
            stock(model, target_name, param_value, loading_info, hf_quantizer)
            placed = [param_value]
        else:
            stock(model, target_name, param_value, loading_info, hf_quantizer)
            placed = _to_place(getattr(module, name))
            for held in placed:
                part, held.data = _placed(store, kind, target_name, held.data)
        for held in placed:
            store.count(getattr(module, name), kind, part, held)
            files.add(target_name, getattr(module, name) if held is param_value else held)
        if placed:
            _loaded_by[getattr(module, name)] = store.parts[kind]

    return set_in_place


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
    config = found.config()
    dtype = found.dtype(dtype)
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    with unreadable(found.path), torch.device("meta"):
        chosen = config.dtype if dtype == "auto" else dtype
        return AutoModelForCausalLM.from_config(config, dtype=chosen, **options)


def weight_bytes(model: PreTrainedModel, kinds: Collection[str] = ()) -> dict[str, int]:
    """Bytes of every kind of weight of a model, which may be without its weights.

    Of a quantized checkpoint nothing: only loading it tells what its weights will take. Experts
    that ``kinds`` name by number are counted there and not with the others.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        return {}
    found = dict.fromkeys(WEIGHT_KINDS, 0)
    tied = getattr(model, "all_tied_weights_keys", {})
    for name, weight in named_weights(model):
        found[kind_of_weight(name, tied)] += weight.nbytes
    for kind in kinds:
        experts = named_experts(kind)
        if experts is not None:
            parts = (part for part in expert_parts(model) if part.expert in experts)
            found[kind] = sum(part.weight.nbytes for part in parts)
            found["experts"] -= found[kind]
    return {kind: count for kind, count in found.items() if count}
