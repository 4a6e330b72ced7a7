"""Threads of a plan: as many as saturate a node that CPUs read, and no node that they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cxl_offload.plan.flexgen.plan import InferenceRequest, plan_inference
from cxl_offload.plan.hardware import hardware_of
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import parse_plan, plan_text
from cxl_offload.plan.thread_counts import threads_by_node
from cxl_offload.plan.transformers.plan import TransformersRequest, plan_transformers
from cxl_offload.plan.vllm.plan import VllmRequest, plan_vllm
from cxl_offload.plan.what_if import with_gpu
from cxl_offload.topology import Machine, load_machine

MACHINE = "epyc9354-cxl-a"


def saturated_by(machine: Machine, threads: dict[int, int]) -> Machine:
    """The machine with known curves."""
    return replace(
        machine,
        accesses=tuple(
            replace(each, read_saturation_threads=threads.get(each.target))
            for each in machine.accesses
        ),
    )


def test_nodes_have_as_many_threads_as_saturate_them() -> None:
    machine = saturated_by(load_machine(MACHINE), {0: 20, 1: 7, 2: 3})
    hardware = hardware_of(machine)
    read = [node.read_bytes_per_s for node in hardware.nodes]  # all would end at once
    threads, notes = threads_by_node(machine, hardware, read)
    assert threads == {0: hardware.cores - 10, 1: 7, 2: 3}
    assert not notes
    assert threads_by_node(machine, hardware, [0.0, 1.0, 0.0])[0] == {1: hardware.cores}
    assert threads_by_node(machine, hardware, [0.0, 0.0, 0.0]) == ({}, [])


def test_curve_that_is_not_known_is_assumed_and_said() -> None:
    machine = load_machine(MACHINE)
    hardware = hardware_of(machine)
    threads, notes = threads_by_node(machine, hardware, [1.0, 1.0, 1.0])
    assert sum(threads.values()) == hardware.cores
    assert notes == [
        "threads of the nodes: 14 GB/s a thread assumed on ldram, rdram, cxl; cxl-offload profile "
        "measures it"
    ]


@pytest.mark.parametrize("gpu", ["none", "h100"])
def test_plans_of_engines_whose_cpus_read_name_their_threads(gpu: str) -> None:
    machine = with_gpu(load_machine(MACHINE), gpu)
    plan = plan_transformers(
        TransformersRequest(
            model=load_model("llama-65b"), machine=machine, prompt=512, generated=32,
            model_name="llama-65b", replay=None, prices=False, cxl_margin=0.0,
        )
    )  # fmt: skip
    read = [node for node, nbytes in plan.node_bytes.items() if nbytes]
    assert set(plan.threads) <= set(read)
    assert len(plan.threads) > 1
    assert sum(plan.threads.values()) == 32
    assert any("a thread assumed on" in note for note in plan.notes)
    assert parse_plan(plan_text(plan), file="p").threads == plan.threads


def test_flexgen_has_threads_where_it_is_this_engine_and_vllm_has_none() -> None:
    given = {"model": load_model("opt-66b"), "machine": load_machine(MACHINE), "prompt": 512,
             "generated": 32, "model_name": "opt-66b", "replay": None}  # fmt: skip
    own = plan_inference(InferenceRequest(**given))  # type: ignore[arg-type]
    assert sum(own.threads.values()) == 32
    assert not plan_inference(InferenceRequest(**given, engine="stock")).threads  # type: ignore[arg-type]
    assert not plan_vllm(VllmRequest(**given)).threads  # type: ignore[arg-type]
