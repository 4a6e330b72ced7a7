"""Stripes that lean to far memory where near memory is small, on a shipped machine."""

from __future__ import annotations

import re

import pytest

from cxl_offload.plan.equations.interleave import best_weights
from cxl_offload.plan.flexgen import planner
from cxl_offload.plan.flexgen.job import FlexGenJob
from cxl_offload.plan.flexgen.mode import rates_of
from cxl_offload.plan.flexgen.plan import InferenceRequest, plan_inference
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import Plan
from cxl_offload.topology import load_machine
from cxl_offload.units import GIB


def plan_with_little_local_memory() -> Plan:
    return plan_inference(
        InferenceRequest(
            model=load_model("opt-66b"),
            machine=load_machine("spr3-h100"),
            prompt=1024,
            generated=128,
            model_name="opt-66b",
            limits={"ldram": 16 * GIB},
            prices=False,
        )
    )


def by_bandwidths(job: FlexGenJob, hardware: Hardware, kind: str) -> list[tuple[int, ...]]:
    """Of two nodes and more, those of the nearest tiers."""
    rates = rates_of(hardware, kind)
    counts = range(2, len(rates) + 1)
    made = ((*best_weights(rates[:count], total=16), *(0,) * len(rates)) for count in counts)
    return [each[: len(rates)] for each in made]


def test_stripes_lean_to_far_memory_where_near_memory_is_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the bandwidths, local memory is full before the others."""
    found = plan_with_little_local_memory()
    monkeypatch.setattr(planner, "ratios_of", by_bandwidths)
    before = plan_with_little_local_memory()

    policies = {home.policy for home in found.homes if home.policy.startswith("weighted:")}
    assert policies
    for policy in policies:
        shares = {name: int(share) for name, share in re.findall(r"(\w+)=(\d+)", policy)}
        near, far = shares.get("ldram", 0), shares.get("rdram", 0) + shares.get("cxl", 0)
        assert near * 4 < far, policy
    assert found.tokens_per_s > 1.2 * before.tokens_per_s
