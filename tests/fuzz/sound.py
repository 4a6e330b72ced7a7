"""Sound documents of every kind, to be read and to be spoilt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import yaml

import cxl_offload
from cxl_offload.files import read_text, shipped_file, shipped_names
from cxl_offload.plan.flexgen.plan import InferenceRequest, plan_inference
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import Plan, plan_text
from cxl_offload.plan.training.plan import TrainingRequest, plan_training
from cxl_offload.plan.transformers.plan import TransformersRequest, plan_transformers
from cxl_offload.plan.vllm.plan import VllmRequest, plan_vllm
from cxl_offload.plan.what_if import with_gpu
from cxl_offload.profile.model import (
    BandwidthCurve,
    BandwidthPoint,
    Estimate,
    Fingerprint,
    Latency,
    NodeFacts,
    PathProfile,
    Profile,
)
from cxl_offload.profile.operators.model import (
    AdamPoint,
    CachePoint,
    CacheTypePoint,
    LayerPoint,
    LinearPoint,
    OperatorProfile,
    Piece,
    PiecePoint,
    ProductPoint,
)
from cxl_offload.profile.store import profile_text
from cxl_offload.sim.trace import Event, Trace
from cxl_offload.topology import Machine, load_machine, machine_to_json


@cache
def machine() -> Machine:
    return load_machine("epyc9354-cxl-a")


def _inference(request: Callable[..., Any], plan: Callable[[Any], Plan], name: str) -> Plan:
    return plan(
        request(
            model=load_model(name),
            machine=machine(),
            prompt=64,
            generated=8,
            model_name=name,
            tiers=("ldram", "cxl"),
        )
    )


PLANNERS: Mapping[str, Callable[[], Plan]] = {
    "flexgen": lambda: _inference(InferenceRequest, plan_inference, "opt-1.3b"),
    "transformers": lambda: plan_transformers(
        TransformersRequest(
            model=load_model("opt-1.3b"),
            machine=with_gpu(machine(), "none"),
            prompt=64,
            generated=8,
            model_name="opt-1.3b",
            sockets=2,
        )
    ),
    "vllm": lambda: _inference(VllmRequest, plan_vllm, "llama-2-7b"),
    "deepspeed": lambda: plan_training(
        TrainingRequest(model=load_model("gpt2"), machine=machine(), batch=1, tokens=64)
    ),
}
"""A plan for each executor."""


@cache
def plans() -> tuple[str, ...]:
    return tuple(plan_text(made()) for made in PLANNERS.values())


@cache
def machine_files() -> tuple[str, ...]:
    return tuple(read_text(shipped_file("machines", name)) for name in shipped_names("machines"))


@cache
def machine_texts() -> tuple[str, ...]:
    return tuple(machine_to_json(load_machine(name)) for name in shipped_names("machines")[:4])


@cache
def model_files() -> tuple[str, ...]:
    texts = [read_text(shipped_file("models", name)) for name in shipped_names("models")]
    configs = [json.dumps(yaml.safe_load(text)["config"], indent=1) for text in texts[:6]]
    return (*texts, *configs)


@cache
def profiles() -> tuple[str, ...]:
    rate = Estimate(median=1e10, low=9e9, high=2e10, samples=3)
    curve = BandwidthCurve("load", "base", (BandwidthPoint(1, rate), BandwidthPoint(2, rate)))
    latency = Latency("base", 1 << 20, rate)
    path = PathProfile(0, 0, (0, 1), 1 << 20, latencies=(latency,), curves=(curve,))
    whose = Fingerprint(
        cpu_model="a processor",
        cpus=2,
        nodes=(NodeFacts(id=0, kind="dram", cpus=2, capacity_bytes=64 << 30),),
        kernel="6.12",
        page_bytes=4096,
        transparent_huge_pages="madvise",
        isa="scalar",
    )
    made = Profile(
        machine=whose, date="now", measured=True, mode="quick", seconds=1.0, paths=(path,)
    )
    return (profile_text(made), profile_text(replace(made, operators=(_operators(rate),))))


def _operators(seconds: Estimate) -> OperatorProfile:
    """Some of everything that is measured."""
    return OperatorProfile(
        device="cpu",
        threads=2,
        linears=(LinearPoint(1, 1 << 20, seconds),),
        caches=(CachePoint("load", 1 << 20, seconds),),
        layers=(LayerPoint(1, 768, seconds, seconds),),
        products=tuple(ProductPoint(rows, 1 << 20, seconds) for rows in (1, 8, 512)),
        pieces=tuple(
            PiecePoint(piece, rows, 4096 if piece == "long attention" else 768, seconds)
            for piece in get_args(Piece)
            for rows in (1, 8)
        ),
        cache_types=tuple(
            CacheTypePoint(kept, 1, 1 << 20, 1 << 21, seconds) for kept in ("", "int4")
        ),
        adam=AdamPoint(1 << 20, 1 << 24, seconds),
    )


@cache
def traces() -> tuple[str, ...]:
    event = Event("decode", 1, "cpu", "cpu", "weights", {0: 5, 2: 7}, {1: 3}, 9, 2.5)
    return (Trace([event, event], tokens={"decode": 4}).to_json(),)


@cache
def cases() -> tuple[str, ...]:
    folder = Path(cxl_offload.__file__).parent / "validation" / "cases"
    published = json.loads((folder / "published.json").read_text(encoding="utf-8"))
    return (json.dumps(published[:3], indent=1), json.dumps(published[-3:], indent=1))
