"""A checkpoint loaded with its weights straight to their place."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, core_model_loading
from transformers.distributed import DistributedConfig

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.bitsandbytes_weights import is_of_bitsandbytes, settle
from cxl_offload.integrations.transformers.checkpoint import ModelFiles, auto_class
from cxl_offload.integrations.transformers.in_place import made_in_place
from cxl_offload.integrations.transformers.kinds import (
    checked_weights,
    chosen_policies,
    kind_of_weight,
)
from cxl_offload.integrations.transformers.layer_shares import split_shares
from cxl_offload.integrations.transformers.plans import Asked, asked_of, weights_as
from cxl_offload.integrations.transformers.read_errors import unloadable
from cxl_offload.integrations.transformers.weight_files import FileWeights
from cxl_offload.integrations.transformers.weight_reads import (
    ask_for_first_pages,
    reads_of_weights,
    start_filling,
)
from cxl_offload.integrations.transformers.weight_room import check_weights_fit
from cxl_offload.integrations.transformers.weights import (
    empty_in_place,
    is_plain,
    named_weights,
    note_missing_kinds,
    place_held,
    placed,
    refuse_numbers,
    set_loaded,
    staying,
    store_for,
    was_loaded,
)
from cxl_offload.memory import Replicate, Session, current_session
from cxl_offload.objects.kind_store import TierStore
from cxl_offload.transfer.file_reads import FileReads

_SETTER = "set_param_for_module"
_SETTER_PARAMETERS = ["model", "target_name", "param_value", "loading_info", "hf_quantizer"]
_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"
_one_load = threading.Lock()
_forked_midway = False


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

    No more than one weight, and what unpacking it takes, is in ordinary memory at a time, so that
    a model may be larger than the node that reads its file.

    Parameters
    ----------
    folder
        A checkpoint as transformers saves it, a PEFT adapter that names the folder of its model, or
        a GGUF file. Nothing is downloaded. What is dequantized
        while it loads goes to its place tensor by tensor.
    policies
        A plan for transformers, its file, or kind of tensor to policy; a kind without one is loaded
        into ordinary memory.
    dtype
        Of the weights; ``"auto"`` is that of the plan, else of the checkpoint, and of a GGUF file
        float32.
    attention
        ``"eager"`` or ``"sdpa"``; None is the model's own choice.
    distributed
        How transformers divides weights among the ranks of a ``torch.distributed`` group, as
        ``DistributedConfig(tp_plan="auto")``: this rank's part goes to its place. None: not at all.
    session
        What allocates; None means the current session.
    store
        Counts the bytes by kind, if the caller wants to know; then it also has the policies, and
        the caller has seen that they fit.

    Returns
    -------
    PreTrainedModel
        In eval mode. Its weights stay in their tiers as long as it lives.

    Raises
    ------
    ConfigError
        No checkpoint there, one that is quantized in a way that transformers cannot load here, or
        an unknown kind, tier or node; or a process that was forked while another thread loaded.
    MemoryError
        A node has no room: one line, before a weight is read. Of a quantized checkpoint the least
        that its files say is known by then, and the rest where it is allocated.
    """
    told: Collection[str] = ()
    if store is None:
        session = session or current_session()
        asked = asked_of(policies)
        dtype, split = weights_as(dtype, asked.plan), split_shares(asked.policies)
        on_accelerator = asked.accelerator is not None
        chosen = chosen_policies(split.on_host, session, on_accelerator=on_accelerator)
        told = checked_weights(asked.policies) if asked.plan is None else ()
        store = store_for(chosen, session, shares=split.layers)
        check_weights_fit(folder, chosen, store, session, dtype=dtype, distributed=distributed)
    found = ModelFiles.at(folder)
    config = found.config()
    options = found.model_options(config)
    options |= {} if attention is None else {"attn_implementation": attention}
    options |= {} if distributed is None else {"distributed_config": distributed}
    files, reads = FileWeights(found.folder), reads_of_weights()
    loading = _Loading(store, files, reads)
    with _alone(), reads, _setting_in(loading), unloadable(found.path):
        ask_for_first_pages(found.folder)
        model, said = auto_class(config).from_pretrained(
            found.folder, dtype=found.dtype(dtype), output_loading_info=True, **options
        )
        reads.wait()
        _refuse_missing(found.path, said["missing_keys"])
        if found.adapter is not None:
            model.load_adapter(str(found.adapter), adapter_kwargs={"local_files_only": True})
    loading.place_late(model)
    note_missing_kinds(model, told)
    weakref.finalize(model, files.forget).atexit = False
    return model.eval()


def _refuse_missing(path: Path, names: Collection[str]) -> None:
    """transformers gives random numbers to weights that no file has, and only warns."""
    if names:
        first, more = min(names), len(names) - 1
        others = f" and {more} more" if more else ""
        raise ConfigError(
            f"{path}: the files have no {first}{others}, which would be random numbers; complete "
            "the checkpoint"
        )


class _Loading:
    """One model on its way from its files to its places.

    Parameters
    ----------
    store
        Has the policies, and counts.
    files
        Are told what came from them.
    reads
        Fill plain weights while memory of the next ones is made. Who has a quantizer looks at
        weights before all are there: its weights are read one by one.
    """

    def __init__(self, store: TierStore, files: FileWeights, reads: FileReads) -> None:
        self._store, self._files, self._reads = store, files, reads
        self._names: dict[int, set[str]] = {}
        self._layers: dict[nn.Module, str] = {}
        self._tied: dict[str, str] = {}
        self._stays = set[str]()
        self._ready: dict[int, int] = {}
        """Addresses of weights that are in their place before they are set, to their part."""

    def _kind(self, model: nn.Module, name: str) -> str | None:
        """The kind of a weight that is to be placed; None: it stays, or is no weight."""
        if id(model) not in self._names:
            stays = staying(self._store, model)
            self._names[id(model)] = {each for each, _ in named_weights(model)} - stays
            self._stays |= stays
            self._layers = {layer: each for each, layer in model.named_modules()}
            self._tied = getattr(model, "all_tied_weights_keys", {})
        kind = kind_of_weight(name, self._tied)
        return kind if name in self._names[id(model)] and kind in self._store.parts else None

    def empty(
        self, model: nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """As of :class:`~cxl_offload.integrations.transformers.in_place.Places`."""
        kind = self._kind(model, name)
        if kind is None or not math.prod(shape):
            return None
        module_name, _, own = name.rpartition(".")
        if hasattr(getattr(model.get_submodule(module_name), own), "placements"):
            return None  # a rank has a part of it
        if any(isinstance(each.policy, Replicate) for each in self._store.parts[kind]):
            return None  # whoever fills it would write the first copy only
        part, made = empty_in_place(self._store, kind, name, shape, dtype)
        self._ready[made.data_ptr()] = part
        return made

    def fill(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        """As of :class:`~cxl_offload.integrations.transformers.in_place.Places`."""
        start_filling(self._reads, target, tensor)

    def setter(self, stock: Callable[..., None]) -> Callable[..., None]:
        """``stock``, with the weight in its place first."""

        def set_in_place(
            model: Any, target_name: str, param_value: Any, loading_info: Any, hf_quantizer: Any
        ) -> None:
            rest = (loading_info, hf_quantizer)
            kind = self._kind(model, target_name)
            if kind is None:
                stock(model, target_name, param_value, *rest)
                return
            module_name, _, name = target_name.rpartition(".")
            module = model.get_submodule(module_name)
            refuse_numbers(self._store, kind, target_name, getattr(module, name))
            if param_value.numel() and is_plain(param_value):
                part = self._ready.pop(param_value.data_ptr(), None)
                if part is None:
                    reads = self._reads if hf_quantizer is None else None
                    part, param_value = placed(self._store, kind, target_name, param_value, reads)
                stock(model, target_name, param_value, *rest)
                weight = getattr(module, name)
                self._files.add(target_name, weight)
                self._note(kind, weight, [(part, param_value)])
            else:
                stock(model, target_name, param_value, *rest)
                self._place(target_name, kind, getattr(module, name))

        return set_in_place

    def place_layer(self, layer: nn.Module) -> None:
        """As of :class:`~cxl_offload.integrations.transformers.in_place.Places`."""
        if layer in self._layers:
            prefix = self._layers[layer]
            self._place_all(named_weights(layer, f"{prefix}." if prefix else ""), self._tied)

    def place_late(self, model: PreTrainedModel) -> None:
        """Move what was made after the weights of the file were set, one by one."""
        self._stays |= staying(self._store, model)
        self._place_all(named_weights(model), getattr(model, "all_tied_weights_keys", {}))

    def _place_all(
        self, weights: Iterable[tuple[str, torch.Tensor]], tied: Mapping[str, str]
    ) -> None:
        for name, weight in weights:
            kind = kind_of_weight(name, tied)
            if name in self._stays:
                continue
            if kind in self._store.parts and not was_loaded(weight, self._store.parts[kind]):
                self._place(name, kind, weight)

    def _place(self, name: str, kind: str, weight: torch.Tensor) -> None:
        if is_of_bitsandbytes(weight):
            settle(weight)
        held_in = list(place_held(self._store, kind, name, weight))
        for _, held in held_in:
            self._files.add(name, held)
        self._note(kind, weight, held_in)

    def _note(
        self, kind: str, weight: torch.Tensor, held_in: list[tuple[int, torch.Tensor]]
    ) -> None:
        for part, held in held_in:
            self._store.count(weight, kind, part, held)
        if held_in:
            set_loaded(weight, self._store.parts[kind])


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One load at a time, since transformers is changed for all threads meanwhile."""
    if _forked_midway:
        raise ConfigError(
            "this process was forked while another thread loaded a model, and has half of its "
            "work; load in the parent, or start a new process"
        )
    with _one_load:
        yield


def _look_in_child() -> None:
    """A thread that loaded is not in the child, but what it changed is, and its lock."""
    global _forked_midway
    _forked_midway = _one_load.locked()


os.register_at_fork(after_in_child=_look_in_child)


@contextlib.contextmanager
def _setting_in(loading: _Loading) -> Iterator[None]:
    """Every weight that transformers sets goes to its place first; it has no hook for that."""
    stock = getattr(core_model_loading, _SETTER, None)
    if stock is None or list(inspect.signature(stock).parameters) != _SETTER_PARAMETERS:
        raise ConfigError(
            "this transformers sets weights in another way than 5.19, so they cannot be loaded to "
            "their place; load the model as usual and offload() moves its weights"
        )

    before = os.environ.get(_ONE_BY_ONE)
    os.environ[_ONE_BY_ONE] = "1"
    setattr(core_model_loading, _SETTER, loading.setter(stock))
    try:
        with made_in_place(loading):
            yield
    finally:
        setattr(core_model_loading, _SETTER, stock)
        if before is None:
            del os.environ[_ONE_BY_ONE]
        else:
            os.environ[_ONE_BY_ONE] = before
