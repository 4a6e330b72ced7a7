"""Requests to the planner for transformers, with what most tests do not vary."""

from __future__ import annotations

from typing import Any

from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.transformers.plan import TransformersRequest
from cxl_offload.topology import load_machine

MODELS = ("opt-6.7b", "llama-65b", "llama-3-70b", "mixtral-8x7b", "mistral-7b", "gpt2-xl")


def request(model: str = "llama-65b", machine: str = "epyc9354-cxl-a", **extra: Any) -> Any:
    given: dict[str, Any] = {"prompt": 512, "generated": 32, "model_name": model, **extra}
    return TransformersRequest(
        model=load_model(model), machine=load_machine(machine), replay=None, prices=False, **given
    )
