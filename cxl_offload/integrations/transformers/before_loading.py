"""All of a run that can be refused before a weight is read: model, lengths and room."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.fit import check_fit, room
from cxl_offload.integrations.transformers.accelerator_kv import AcceleratorKv
from cxl_offload.integrations.transformers.checkpoint import ModelFiles
from cxl_offload.integrations.transformers.config_checks import check_windows
from cxl_offload.integrations.transformers.conventions import check_conventions, text_config
from cxl_offload.integrations.transformers.fit import (
    KvSizes,
    accelerator_kv_bytes,
    check_length,
    kv_needs,
)
from cxl_offload.integrations.transformers.model_device import ModelDevice
from cxl_offload.integrations.transformers.prefixes import checked_prefixes
from cxl_offload.integrations.transformers.ranked import RankPart
from cxl_offload.integrations.transformers.room import KvMemory
from cxl_offload.integrations.transformers.row_parts import check_rows
from cxl_offload.integrations.transformers.run_checks import check_stop
from cxl_offload.integrations.transformers.state_sizes import StateSizes
from cxl_offload.integrations.transformers.weight_room import weight_needs
from cxl_offload.integrations.transformers.weights import store_for
from cxl_offload.memory import Session
from cxl_offload.objects.kind_store import TierStore
from cxl_offload.plan.equations.row_states import STATES

if TYPE_CHECKING:
    from cxl_offload.integrations.transformers.generation import GenerateRun


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlaces:
    """Where a process puts what it generates with.

    Attributes
    ----------
    policies
        Of the kinds that lie on the host.
    store
        With these.
    device
        The accelerator; None: CPUs compute.
    kv_there
        The part of the cache there; None: there is none.
    rows_at_once
        Rows that a layer computes at once; None: all.
    """

    session: Session
    policies: Mapping[str, Any]
    store: TierStore
    device: ModelDevice | None
    kv_there: AcceleratorKv | None
    rows_at_once: int | None


def check_before_loading(
    request: GenerateRun, model: Any, places: RunPlaces, part: RankPart, ids: torch.Tensor
) -> None:
    """All that a model without its weights tells of the rows that this process generates.

    Raises
    ------
    ConfigError, MemoryError
        In one line: a model against the conventions, prompts too long for it, nodes or an
        accelerator too small.
    """
    rows, prompt_len = ids.shape
    if not prompt_len:
        raise ConfigError("--prompts: the tokenizer makes no token of any of them")
    check_conventions(model)
    check_windows(ModelFiles.at(request.model).described_in, text_config(model))
    check_rows(places.rows_at_once, places.store, model, streamed=True)  # it loads to host memory
    part.check(model)
    config, device = text_config(model), places.device
    kept = request.kept_as() or model.dtype
    ranks = part.size if part.divided == "tensors" else 1
    sizes = KvSizes(
        rows=rows,
        positions=prompt_len + request.gen_len - 1,
        divided_by=ranks,
        accelerator=places.kv_there,
    )
    states = StateSizes(
        rows=rows,
        tokens=prompt_len,
        rows_at_once=places.rows_at_once,
        streamed=device is not None,
    )
    if device is not None:
        kinds, on_it = places.policies, accelerator_kv_bytes(config, kept, sizes)
        buffers = states.buffers_bytes(model, kinds)
        device.check_room(model, kinds, kv_bytes=on_it, state_bytes=buffers)
    _check_prefixes(request, places, part, model)
    check_length(Path(request.model).name, prompt_len, request.gen_len, config)
    check_stop(request.stop, config)
    needs = weight_needs(model, request.model, places.policies, places.store, divided_by=ranks)
    if "kv" in places.policies:
        whole, policy = request.whole_sequences, places.policies["kv"]
        needs += kv_needs(config, kept, policy, sizes, whole_sequences=whole)
    if STATES in places.policies:
        needs += states.needs(model, places.policies[STATES])
    check_fit(needs, room(places.session, request.limits))


def _check_prefixes(request: GenerateRun, places: RunPlaces, part: RankPart, model: Any) -> None:
    if request.prefixes is None:
        return
    part.check_alone("prefixes are kept")
    kv = KvMemory(store_for(places.policies, places.session), request.kept_as())
    checked_prefixes(model, request.prefixes, kv, places.session)
