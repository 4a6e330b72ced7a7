"""Spoiling the KV cache of one place in the middle of a generation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from flexgen.pytorch_backend import DeviceType, TorchTensor

from cxl_offload.integrations.flexgen import FlexGenReport, FlexGenRun, LoadedModel
from cxl_offload.memory import Session

AT_TOKEN = 2  # the prompt and one token are in the cache by then


def generate_damaged(request: FlexGenRun, session: Session, place: str | int) -> FlexGenReport:
    """The report of a run in which all KV in ``place`` was spoilt before the third token.

    ``place`` is ``accelerator``, ``disk`` or a node.
    """
    with LoadedModel(request, session=session) as loaded:
        spoilt = [0]

        def spoil(token: int) -> None:
            if token == AT_TOKEN:
                loaded.model.sync()
                spoilt[0] = sum(_spoil(x, place, session) for x in loaded.model.kv_tensors())

        report = loaded.generate(token_begins=spoil)
    assert spoilt[0] > 0, f"no KV cache in {place}"
    return report


def _spoil(tensor: TorchTensor, place: str | int, session: Session) -> int:
    """Negate and triple the part of a tensor that is in ``place``; returns its bytes."""
    kind = tensor.device.device_type
    if kind == DeviceType.DISK:
        if place == "disk":
            values = np.lib.format.open_memmap(tensor.data)
            values[...] = -3 * values
            return int(values.nbytes)
        return 0
    if kind == DeviceType.CUDA:
        if place == "accelerator":
            tensor.data.mul_(-3)
            return int(tensor.data.nbytes)
        return 0
    if not isinstance(place, int):
        return 0
    return _each_page(tensor.data, lambda address: session.bytes_per_node(address, 1), place)


def _each_page(data: torch.Tensor, ask: Callable[[int], dict[int, int]], node: int) -> int:
    flat = data.view(-1)
    per_page = 4096 // flat.element_size()
    spoilt = 0
    for at in range(0, flat.numel(), per_page):
        piece = flat[at : at + per_page]
        if node in ask(piece.data_ptr()):
            piece.mul_(-3)
            spoilt += piece.numel() * piece.element_size()
    return spoilt
