"""Plans: which tensors lie where, in which batches, and how fast that is predicted to be.

>>> from cxl_offload import load_machine
>>> from cxl_offload.plan import InferenceRequest, load_model, plan_inference, save_plan
>>> plan = plan_inference(InferenceRequest(
...     model=load_model("opt-30b"), model_name="opt-30b", prompt=512, generated=32,
...     machine=load_machine("epyc9354-cxl-a")))
>>> save_plan(plan, "plan.yaml")

A function and a request for each executor: :func:`plan_inference` (FlexGen),
:func:`plan_transformers`, :func:`plan_vllm` and :func:`plan_training` (DeepSpeed). A
:class:`Plan` is frozen data: :func:`save_plan` and :func:`load_plan` keep it in a file,
:func:`compare_plans` holds two beside each other, :func:`with_memory` and :func:`with_gpu` plan for
a machine that is not bought yet.

Nothing here allocates memory or imports torch or a framework. Modules load when a name of theirs is
first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxl_offload.lazy import lazy_names

if TYPE_CHECKING:
    from cxl_offload.plan.flexgen.plan import InferenceRequest, plan_inference
    from cxl_offload.plan.missing import MissingNumberError
    from cxl_offload.plan.model.config import ModelConfig
    from cxl_offload.plan.model.file import load_model, model_names
    from cxl_offload.plan.plan_file import (
        Batch,
        CopiesUse,
        CxlUse,
        ErrorEstimate,
        Home,
        PhaseEstimate,
        Plan,
        PriceEstimate,
        load_plan,
        parse_plan,
        plan_text,
        save_plan,
    )
    from cxl_offload.plan.request import PlanRequest
    from cxl_offload.plan.tensor_policy import TensorPolicy, TensorUse, TierRate, tensor_policies
    from cxl_offload.plan.training.plan import TrainingRequest, plan_training
    from cxl_offload.plan.training.ranks import Ranks
    from cxl_offload.plan.transformers.plan import TransformersRequest, plan_transformers
    from cxl_offload.plan.two_plans import PlanComparison, compare_plans
    from cxl_offload.plan.vllm.plan import VllmRequest, plan_vllm
    from cxl_offload.plan.what_if import with_gpu, with_memory

__all__ = [
    "Batch",
    "CopiesUse",
    "CxlUse",
    "ErrorEstimate",
    "Home",
    "InferenceRequest",
    "MissingNumberError",
    "ModelConfig",
    "PhaseEstimate",
    "Plan",
    "PlanComparison",
    "PlanRequest",
    "PriceEstimate",
    "Ranks",
    "TensorPolicy",
    "TensorUse",
    "TierRate",
    "TrainingRequest",
    "TransformersRequest",
    "VllmRequest",
    "compare_plans",
    "load_model",
    "load_plan",
    "model_names",
    "parse_plan",
    "plan_inference",
    "plan_text",
    "plan_training",
    "plan_transformers",
    "plan_vllm",
    "save_plan",
    "tensor_policies",
    "with_gpu",
    "with_memory",
]

__getattr__, __dir__ = lazy_names(__name__)
