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
from cxl_offload.plan.training.ranks import Ranks
from cxl_offload.plan.transformers.plan import TransformersRequest, plan_transformers
from cxl_offload.plan.vllm.defaults import MOST_RUNNING
from cxl_offload.plan.vllm.plan import VllmRequest, plan_vllm
from cxl_offload.topology import load_machine
from cxl_offload.units import GIB
from cxl_offload.validation.answers import Answer, PublicModel, machine_name
from cxl_offload.validation.inputs import Inputs
from cxl_offload.validation.wave import serve_wave

EXECUTORS = ("flexgen", "flexgen-stock", "transformers", "vllm", "deepspeed")
METRICS = (
    "tokens_per_s",
    "decode_tokens_per_s",
    "sequences",
    "step_s",
    "ttft_s",
    "per_token_s",
    "tier_gib",
    "ratio",
    "order",
)
ABSOLUTE = METRICS[:6]
"""Those whose published value is a measurement of one system, not a relation of two."""

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
    "num_prompts",
    "answers",
    "gpus",
    "hosts",
    "network_gb_s",
    "stage",
    "flash",
    "sockets",
    "kv_dtype",
)
"""Keys of one request; those of ``a``, ``b`` and ``requests`` replace them one by one."""


def _asked_of(inputs: Inputs) -> dict[str, Any]:
    made: dict[str, Any] = {
        "model": load_model(inputs.text("plan_model")),
        "machine": load_machine(machine_name(inputs)),
        "replay": None,
        "prices": False,  # no metric asks for them
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
    kept = (inputs.text("kv_dtype"),) if "kv_dtype" in inputs else ()
    sockets = inputs.integer("sockets", low=1, default=1)
    return plan_transformers(
        TransformersRequest(**_batches(inputs), kv_dtypes=kept, sockets=sockets)
    )


def _vllm_request(inputs: Inputs) -> VllmRequest:
    most = inputs.integer("max_num_seqs", low=1, default=MOST_RUNNING)
    gpus = inputs.integer("gpus", low=1, default=1)
    return VllmRequest(**_served(inputs), most_sequences=most, gpus=gpus)


def _vllm(inputs: Inputs) -> Plan:
    return plan_vllm(_vllm_request(inputs))


def _deepspeed(inputs: Inputs) -> Plan:
    batch, tokens = inputs.integer("batch", low=1), inputs.integer("prompt_len", low=1)
    stage = inputs.integer("stage", low=1) if "stage" in inputs else None
    if stage not in (None, 1, 2, 3):
        raise ValueError(f"stage = {stage}, want 1, 2 or 3")
    network = inputs.optional_number("network_gb_s", above=True)
    ranks = Ranks(
        gpus=inputs.integer("gpus", low=1, default=1),
        hosts=inputs.integer("hosts", low=1, default=1),
        network_bytes_per_s=None if network is None else network * 1e9,
    )
    return plan_training(
        TrainingRequest(
            **_asked_of(inputs),
            batch=batch,
            tokens=tokens,
            stage=stage,  # type: ignore[arg-type]
            ranks=ranks,
            flash_attention="flash" in inputs and inputs.boolean("flash"),
        )
    )


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


def _wave(inputs: Inputs, metric: str) -> Answer:
    """Some requests at once, until the last has ended."""
    if inputs.text("executor") != "vllm":
        raise ValueError("num_prompts: requests that come at once are served by executor vllm")
    spread = inputs.choice("answers", ("even", "spread"), "even") == "spread"
    try:
        wave = serve_wave(
            _vllm_request(inputs), inputs.integer("num_prompts", low=1), spread=spread
        )
    except MemoryError as error:
        raise ValueError(str(error)) from None
    values = {
        "tokens_per_s": wave.tokens_per_s,
        "ttft_s": wave.first_token_s,
        "per_token_s": wave.per_token_s,
    }
    if metric not in values:
        raise ValueError(f"metric = {metric!r} of num_prompts: one of {', '.join(values)}")
    return Answer(values[metric])


def _plan(inputs: Inputs) -> Answer:
    metric = inputs.choice("metric", METRICS)
    if "num_prompts" in inputs:
        return _wave(inputs, metric)
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
    if metric in ("ttft_s", "per_token_s"):
        if plan.serving is None:
            raise ValueError(f"metric = {metric!r}: executor vllm has it")
        seen = plan.serving
        return Answer(seen.first_token_s if metric == "ttft_s" else seen.per_token_s, plan.notes)
    repeats = plan.phases if plan.kind == "training" else plan.phases[-1:]
    values = {
        "step_s": sum(phase.seconds for phase in repeats),
        "tokens_per_s": plan.tokens_per_s,
        "decode_tokens_per_s": plan.batch.size * plan.batch.count / plan.phases[-1].seconds,
        "sequences": plan.batch.size * plan.batch.count,
    }
    return Answer(values[metric], plan.notes)


MODELS = (PublicModel("plan", (*REQUEST, "metric", "tier", "a", "b", "requests"), _plan),)
