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
    from cxl_offload.plan.flexgen.plan import InferenceRequest as InferenceRequest
    from cxl_offload.plan.flexgen.plan import plan_inference as plan_inference
    from cxl_offload.plan.missing import MissingNumberError as MissingNumberError
    from cxl_offload.plan.model.config import ModelConfig as ModelConfig
    from cxl_offload.plan.model.file import load_model as load_model
    from cxl_offload.plan.model.file import model_names as model_names
    from cxl_offload.plan.plan_file import Batch as Batch
    from cxl_offload.plan.plan_file import CopiesUse as CopiesUse
    from cxl_offload.plan.plan_file import CxlUse as CxlUse
    from cxl_offload.plan.plan_file import ErrorEstimate as ErrorEstimate
    from cxl_offload.plan.plan_file import Home as Home
    from cxl_offload.plan.plan_file import PhaseEstimate as PhaseEstimate
    from cxl_offload.plan.plan_file import Plan as Plan
    from cxl_offload.plan.plan_file import PriceEstimate as PriceEstimate
    from cxl_offload.plan.plan_file import load_plan as load_plan
    from cxl_offload.plan.plan_file import parse_plan as parse_plan
    from cxl_offload.plan.plan_file import plan_text as plan_text
    from cxl_offload.plan.plan_file import save_plan as save_plan
    from cxl_offload.plan.request import PlanRequest as PlanRequest
    from cxl_offload.plan.tensor_policy import TensorPolicy as TensorPolicy
    from cxl_offload.plan.tensor_policy import TensorUse as TensorUse
    from cxl_offload.plan.tensor_policy import TierRate as TierRate
    from cxl_offload.plan.tensor_policy import tensor_policies as tensor_policies
    from cxl_offload.plan.training.plan import TrainingRequest as TrainingRequest
    from cxl_offload.plan.training.plan import plan_training as plan_training
    from cxl_offload.plan.training.ranks import Ranks as Ranks
    from cxl_offload.plan.transformers.plan import TransformersRequest as TransformersRequest
    from cxl_offload.plan.transformers.plan import plan_transformers as plan_transformers
    from cxl_offload.plan.two_plans import PlanComparison as PlanComparison
    from cxl_offload.plan.two_plans import compare_plans as compare_plans
    from cxl_offload.plan.vllm.plan import VllmRequest as VllmRequest
    from cxl_offload.plan.vllm.plan import plan_vllm as plan_vllm
    from cxl_offload.plan.what_if import with_gpu as with_gpu
    from cxl_offload.plan.what_if import with_memory as with_memory

__getattr__, __dir__ = lazy_names(__name__)
