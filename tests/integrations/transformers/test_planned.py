"""A plan's kinds are those of the integration, with as many bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cxl_offload import Session
from cxl_offload.integrations.transformers import offload
from cxl_offload.integrations.transformers.weights import weight_bytes
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import Plan
from cxl_offload.plan.transformers.job import decoder_job
from cxl_offload.plan.transformers.plan import TransformersRequest, plan_transformers
from cxl_offload.topology import Access, Machine
from tests.integrations.transformers.conftest import machine
from tests.integrations.transformers.models import FAMILIES, make, prompts


@pytest.mark.parametrize("family", FAMILIES)
def test_planned_kinds_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = FAMILIES[family]().to(torch.float16)
    model.config.save_pretrained(tmp_path)
    job = decoder_job(load_model(str(tmp_path)), prompt=8, generated=8)
    assert {kind: size.bytes for kind, size in job.kinds.items()} == weight_bytes(model)


def test_plan_without_a_gpu_puts_every_byte_where_it_says(tmp_path: Path) -> None:
    """The policies of the plan, given to ``offload``, against the pages of simulated nodes."""
    model = make("llama", torch.float16)
    plan = check_planned_bytes(model, replace(machine(), accesses=ACCESSES), tmp_path)
    assert plan.copies is None


def test_plan_for_two_sockets_puts_a_copy_near_each(tmp_path: Path) -> None:
    """Where the link between them is slow, and the model so small that any gain is taken."""
    slow = replace(ACCESSES[1], read_bandwidth_bytes_per_s=10e9)
    model = make("llama", torch.float16)
    small = replace(machine(), accesses=(ACCESSES[0], slow, ACCESSES[2]))
    plan = check_planned_bytes(model, small, tmp_path, sockets=2, cxl_margin=0.0)
    assert plan.copies is not None
    assert plan.copies.used
    assert plan.policies["mlp"] == "replicate:ldram,rdram"


def check_planned_bytes(model: PreTrainedModel, small: Machine, folder: Path, **extra: Any) -> Plan:
    """Generates with the plan's policies and looks at the pages."""
    model.config.save_pretrained(folder)
    asked = TransformersRequest(
        model=load_model(str(folder)),
        machine=small,
        prompt=20,
        generated=12,
        model_name="llama",
        most_batches=8,  # fewer rows of the cache would be too small for a stripe
        replay=None,
        **extra,
    )
    plan = plan_transformers(asked)
    assert plan.runs
    session = Session.simulated(small)
    with offload(model, plan.policies, session=session) as done:
        made = model.generate(**prompts(rows=plan.batch.size), max_new_tokens=12, min_new_tokens=12)
        held = {kind: use.granted for (kind, _), use in done.store.use().items()}
    assert made.shape == (8, 32)
    tiers = {node: tier.name for tier in small.tiers for node in tier.nodes}
    for kind in plan.policies:
        placed = {tiers[node]: nbytes for node, nbytes in held[kind].items()}
        planned = plan.of(kind)
        assert sum(placed.values()) == pytest.approx(sum(planned.values()), rel=0.05), kind
        assert placed.keys() == planned.keys(), kind
    return plan


ACCESSES = tuple(
    Access(0, node, latency, latency, rate, rate)
    for node, latency, rate in ((0, 100, 30e9), (1, 150, 20e9), (2, 250, 10e9))
)
"""Rates so near to each other that a stripe over all nodes is worth it."""
