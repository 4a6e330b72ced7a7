"""The planner as a public model: a plan for a shipped or given model on a machine, as data.

What is asked is tokens/s, the batch, how much is on every tier, or the order of several requests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cxl_offload.plan.flexgen.plan import InferenceRequest, plan_inference
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import Plan
from cxl_offload.plan.training.plan import TrainingRequest, plan_training
from cxl_offload.plan.transformers.plan import TransformersRequest, plan_transformers
from cxl_offload.plan.vllm.defaults import MOST_RUNNING
from cxl_offload.plan.vllm.plan import VllmRequest, plan_vllm
from cxl_offload.topology import load_machine
from cxl_offload.units import GIB
from cxl_offload.validation.answers import Answer, PublicModel, machine_name
from cxl_offload.validation.inputs import Inputs

EXECUTORS = ("flexgen", "flexgen-stock", "transformers", "vllm", "deepspeed")
METRICS = ("tokens_per_s", "decode_tokens_per_s", "sequences", "tier_gib", "ratio", "order")

REQUEST = (
    "plan_model",
    "executor",
    "prompt_len",
    "gen_len",
    "batch",
    "tiers",
    "limits_gib",
    "host_usable_fraction",
    "gpu_usable_fraction",
    "max_batches",
    "max_num_seqs",
    "margin_fraction",
)
"""Keys of one request; those of ``a``, ``b`` and ``requests`` replace them one by one."""


def _asked_of(inputs: Inputs) -> dict[str, Any]:
    made: dict[str, Any] = {
        "model": load_model(inputs.text("plan_model")),
        "machine": load_machine(machine_name(inputs)),
        "replay": None,
    }
    if "tiers" in inputs:
        made["tiers"] = inputs.texts("tiers")
    if "limits_gib" in inputs:
        limits = inputs.named_numbers("limits_gib")
        made["limits"] = {tier: round(size * GIB) for tier, size in limits.items()}
    fractions = {
        "host_usable": "host_usable_fraction",
        "gpu_usable": "gpu_usable_fraction",
        "cxl_margin": "margin_fraction",
    }
    return made | {name: inputs.fraction(key) for name, key in fractions.items() if key in inputs}


def _served(inputs: Inputs) -> dict[str, Any]:
    return {
        **_asked_of(inputs),
        "prompt": inputs.integer("prompt_len", low=1),
        "generated": inputs.integer("gen_len", low=2),
        "model_name": Path(inputs.text("plan_model")).name,
    }


def _batches(inputs: Inputs) -> dict[str, Any]:
    most = inputs.integer("max_batches", low=1) if "max_batches" in inputs else None
    return {**_served(inputs), "most_batches": most}


def _flexgen(inputs: Inputs) -> Plan:
    return plan_inference(InferenceRequest(**_batches(inputs)))


def _stock(inputs: Inputs) -> Plan:
    return plan_inference(InferenceRequest(**_batches(inputs), engine="stock"))


def _transformers(inputs: Inputs) -> Plan:
    return plan_transformers(TransformersRequest(**_batches(inputs)))


def _vllm(inputs: Inputs) -> Plan:
    most = inputs.integer("max_num_seqs", low=1, default=MOST_RUNNING)
    return plan_vllm(VllmRequest(**_served(inputs), most_sequences=most))


def _deepspeed(inputs: Inputs) -> Plan:
    batch, tokens = inputs.integer("batch", low=1), inputs.integer("prompt_len", low=1)
    return plan_training(TrainingRequest(**_asked_of(inputs), batch=batch, tokens=tokens))


_PLANNERS: dict[str, Callable[[Inputs], Plan]] = {
    "flexgen": _flexgen,
    "flexgen-stock": _stock,
    "transformers": _transformers,
    "vllm": _vllm,
    "deepspeed": _deepspeed,
}


def _planned(inputs: Inputs, changes: Inputs | None = None) -> Plan:
    values = dict(inputs.values) | (dict(changes.values) if changes is not None else {})
    asked = Inputs(values, inputs.where)
    try:
        return _PLANNERS[asked.choice("executor", EXECUTORS)](asked)
    except MemoryError as error:
        raise ValueError(str(error)) from None


def _decoded(plan: Plan) -> float:
    """Tokens/s of the phase that repeats."""
    return plan.batch.size * plan.batch.count / plan.phases[-1].seconds


def _plan(inputs: Inputs) -> Answer:
    metric = inputs.choice("metric", METRICS)
    if metric == "order":
        requests = inputs.nested_list("requests", REQUEST)
        rates = [_planned(inputs, request).tokens_per_s for request in requests]
        return Answer(sorted(range(len(rates)), key=lambda at: -rates[at]))
    if metric == "ratio":
        a, b = (_planned(inputs, inputs.nested(key, REQUEST)) for key in ("a", "b"))
        return Answer(a.tokens_per_s / b.tokens_per_s, (*a.notes, *b.notes))
    plan = _planned(inputs)
    if metric == "tier_gib":
        tier = inputs.text("tier")
        nbytes = sum(home.bytes for home in plan.homes if home.where.split()[0] == tier)
        return Answer(nbytes / GIB, plan.notes)
    values = {
        "tokens_per_s": plan.tokens_per_s,
        "decode_tokens_per_s": _decoded(plan),
        "sequences": plan.batch.size * plan.batch.count,
    }
    return Answer(values[metric], plan.notes)


MODELS = (PublicModel("plan", (*REQUEST, "metric", "tier", "a", "b", "requests"), _plan),)
