"""The trace of a plan moves the planned bytes, and disagreement of a replay is said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest

from cxl_offload.plan.decoding.trace import planned_trace
from cxl_offload.plan.flexgen.choice import Choice, block_of, loads_of
from cxl_offload.plan.flexgen.job import flexgen_job
from cxl_offload.plan.flexgen.plan import InferenceRequest, plan_inference
from cxl_offload.plan.hardware import hardware_of
from cxl_offload.plan.model.file import load_model
from cxl_offload.sim import Engines, Trace
from cxl_offload.topology import Machine, load_machine


def moved(trace: Trace, phase: str, engine: str) -> tuple[Counter[int], Counter[int]]:
    read: Counter[int] = Counter()
    written: Counter[int] = Counter()
    for event in trace:
        if (event.phase, event.engine) == (phase, engine):
            read.update(event.read_bytes)
            written.update(event.write_bytes)
    return read, written


def test_trace_moves_what_lies_on_every_node() -> None:
    job = flexgen_job(load_model("opt-13b"), prompt=256, generated=32)
    hardware = hardware_of(load_machine("epyc9354-cxl-a"))
    levels = job.levels()
    top = len(levels) - 1
    choice = Choice(8, 2, (1, 2, 4, top - 1), None, (1, 3, 2, 1, 1), None, False, 1)
    loads = loads_of(job, hardware, choice, levels)

    trace = planned_trace(job, hardware, block_of(choice, loads))

    for phase in ("prefill", "decode"):
        read, _ = moved(trace, phase, "h2d")
        hidden = 2 * 16 * job.width * job.layers if phase == "decode" else 0
        expected = list(loads.weights_host)
        expected[0] += loads.weights_drive
        expected[1] += hidden
        for node, nbytes in enumerate(expected):
            assert read[node] == pytest.approx(nbytes, abs=2 * job.layers)
    _, stored = moved(trace, "prefill", "cpu")  # FlexGen stores them in a loop of the CPU
    per_token = 2 * job.kv_bytes_per_token * job.prompt  # of two batches
    assert [stored[node] for node in range(3)] == [4 * per_token, 2 * per_token, per_token]
    kv, workspace = moved(trace, "decode", "cpu")
    off_gpu = 2 * 7 * job.kv_bytes_per_token * job.mean_kv_tokens
    assert workspace[1] == pytest.approx(2 * off_gpu)
    assert sum(kv.values()) == pytest.approx(3 * off_gpu)  # the cache, then the workspace
    assert moved(trace, "decode", "nvme")[1][0] == pytest.approx(
        loads.weights_drive + off_gpu / 7, abs=2 * job.layers
    )


class Doubled:
    """A replay that takes some multiple of the equations of the first plan."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self.seconds, self.seen = seconds, 0

    def __call__(self, trace: Trace, machine: Machine, engines: Engines) -> Mapping[str, float]:
        self.seen += len(trace)
        return self.seconds


@pytest.mark.parametrize(
    ("prefill", "decode", "named"),
    [(1.0, 1.09, []), (0.8, 1.0, ["prefill"]), (1.2, 1.2, ["prefill", "decode"])],
)
def test_plan_says_where_a_replay_differs(prefill: float, decode: float, named: list[str]) -> None:
    base = InferenceRequest(
        model=load_model("opt-6.7b"),
        machine=load_machine("epyc9354-cxl-a"),
        prompt=64,
        generated=8,
        model_name="opt-6.7b",
        gpu_batches=(4,),
        most_batches=2,
    )
    first, second = (phase.seconds for phase in plan_inference(base).phases)
    replay = Doubled({"prefill": first * prefill, "decode": second * decode})

    fields = {name: getattr(base, name) for name in base.__dataclass_fields__}
    plan = plan_inference(InferenceRequest(**{**fields, "replay": replay}))

    said = [note for note in plan.notes if "(simulated)" in note]
    assert [note.split("replay of the ")[1].split()[0] for note in said] == named
    assert replay.seen > 0


def test_simulator_replays_every_plan_by_default() -> None:
    """Not an oracle of the equations: it must run, and be near where only the link counts."""
    plan = plan_inference(
        InferenceRequest(
            model=load_model("opt-66b"),
            machine=load_machine("epyc9354-cxl-a"),
            prompt=64,
            generated=8,
            model_name="opt-66b",
            tiers=("ldram",),
            gpu_batches=(1,),
            most_batches=1,
        )
    )

    assert not any(note.startswith("not replayed") for note in plan.notes)
    assert plan.phases[1].bottleneck == "weights over the link"
    assert not any("replay of the decode" in note for note in plan.notes)


def test_replay_asks_for_no_number_that_the_planner_assumed() -> None:
    plan = plan_inference(
        InferenceRequest(
            model=load_model("opt-66b"),
            machine=load_machine("spr3-h100"),
            prompt=64,
            generated=8,
            model_name="opt-66b",
            gpu_batches=(64,),
            most_batches=4,
        )
    )

    assert [note for note in plan.notes if "read bandwidth of ldram" in note and "assumed" in note]
    assert not [note for note in plan.notes if note.startswith("not replayed")]
