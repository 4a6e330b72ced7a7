"""A checkpoint loaded with its weights straight to their place."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, core_model_loading
from transformers.distributed import DistributedConfig

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.bitsandbytes_weights import is_of_bitsandbytes, settle
from cxl_offload.integrations.transformers.checkpoint import ModelFiles
from cxl_offload.integrations.transformers.kinds import chosen_policies, kind_of_weight
from cxl_offload.integrations.transformers.plans import Asked, asked_of
from cxl_offload.integrations.transformers.read_errors import unloadable
from cxl_offload.integrations.transformers.weight_files import FileWeights
from cxl_offload.integrations.transformers.weights import (
    is_plain,
    named_weights,
    place_held,
    placed,
    refuse_numbers,
    set_loaded,
    store_for,
    was_loaded,
)
from cxl_offload.memory import Session, current_session
from cxl_offload.objects.kind_store import TierStore

_SETTER = "set_param_for_module"
_SETTER_PARAMETERS = ["model", "target_name", "param_value", "loading_info", "hf_quantizer"]
_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"
_one_load = threading.Lock()


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
        A checkpoint as transformers saves it, a PEFT adapter that names the folder of its model, or
        a GGUF file. Nothing is downloaded. transformers
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
        if found.adapter is not None:
            model.load_adapter(str(found.adapter), adapter_kwargs={"local_files_only": True})
    _place_late(model, store)
    weakref.finalize(model, files.forget).atexit = False
    return model.eval()


def _place_late(model: PreTrainedModel, store: TierStore) -> None:
    """Move what was made after the weights of the file were set: dequantized ones, one by one."""
    tied = getattr(model, "all_tied_weights_keys", {})
    for name, weight in named_weights(model):
        kind = kind_of_weight(name, tied)
        if kind in store.parts and not was_loaded(weight, store.parts[kind]):
            for part, held in place_held(store, kind, name, weight):
                store.count(weight, kind, part, held)
            set_loaded(weight, store.parts[kind])


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
        refuse_numbers(store, kind, target_name, getattr(module, name))
        if param_value.numel() and is_plain(param_value):
            part, param_value = placed(store, kind, target_name, param_value)
            stock(model, target_name, param_value, loading_info, hf_quantizer)
            weight = getattr(module, name)
            held_in = [(part, weight)]
            store.count(weight, kind, part, param_value)
        else:
            stock(model, target_name, param_value, loading_info, hf_quantizer)
            weight = getattr(module, name)
            if is_of_bitsandbytes(weight):
                settle(weight)
            held_in = list(place_held(store, kind, target_name, weight))
            for part, held in held_in:
                store.count(weight, kind, part, held)
        for _, held in held_in:
            files.add(target_name, held)
        if held_in:
            set_loaded(weight, store.parts[kind])

    return set_in_place
