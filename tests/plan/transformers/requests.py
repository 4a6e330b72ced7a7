"""Requests to the planner for transformers, with what most tests do not vary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.transformers.job import DecoderJob
from cxl_offload.plan.transformers.layout import Layout, layouts
from cxl_offload.plan.transformers.plan import TransformersRequest
from cxl_offload.topology import load_machine

MODELS = ("opt-6.7b", "llama-65b", "llama-3-70b", "mixtral-8x7b", "mistral-7b", "gpt2-xl")


def request(model: str = "llama-65b", machine: str = "epyc9354-cxl-a", **extra: Any) -> Any:
    given: dict[str, Any] = {"prompt": 512, "generated": 32, "model_name": model, **extra}
    return TransformersRequest(
        model=load_model(model), machine=load_machine(machine), replay=None, prices=False, **given
    )


def all_layouts(job: DecoderJob, hardware: Hardware) -> list[Layout]:
    """With hidden states on the GPU, and with those of several batches on the host."""
    every = list(layouts(job, hardware))
    if not hardware.has_gpu:
        return every
    on_host = [replace(layout, states="host") for layout in every]
    fit = [each for each in on_host if each.gpu_bytes(job) <= hardware.gpu_usable_bytes]
    return every + fit
