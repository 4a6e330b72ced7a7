"""Training and vLLM plans are replayed: the trace has the planned bytes, differences are said."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.errors import ConfigError
from cxl_offload.plan.flexgen.plan import InferenceRequest, plan_inference
from cxl_offload.plan.gpu import assumed_training_share
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import Plan
from cxl_offload.plan.replay_check import ReplayCheck, simulated_seconds
from cxl_offload.plan.training.job import TrainingJob, host_kinds
from cxl_offload.plan.training.placement import TrainingStep
from cxl_offload.plan.training.plan import TrainingRequest, plan_training
from cxl_offload.plan.training.trace import (
    equation_phases,
    model_shape,
    planned_work,
    replayed_phases,
)
from cxl_offload.plan.vllm.layers import layer_bytes
from cxl_offload.plan.vllm.plan import VllmRequest, plan_vllm
from cxl_offload.sim import Engines, Trace
from cxl_offload.topology import Machine, load_machine

from .training.placed import place

TRAINING = TrainingRequest(
    model=load_model("opt-1.3b"),
    machine=load_machine("epyc9354-cxl-a"),
    batch=12,
    tokens=256,
    stage=2,
)
SERVING = VllmRequest(
    model=load_model("llama-3-70b"),
    machine=load_machine("spr3-h100"),
    prompt=300,
    generated=100,
    model_name="llama-3-70b",
)


class Watched:
    """Keeps the traces and answers with given seconds."""

    def __init__(self, *answers: Mapping[str, float]) -> None:
        self.answers, self.traces = list(answers), []  # type: list[Mapping[str, float]], list[Trace]

    def __call__(self, trace: Trace, machine: Machine, engines: Engines) -> Mapping[str, float]:
        self.traces.append(trace)
        return self.answers[min(len(self.traces), len(self.answers)) - 1]


def said(notes: tuple[str, ...]) -> list[str]:
    return [
        note.partition("replay of the ")[2].split()[0] for note in notes if "(simulated)" in note
    ]


def bytes_of(trace: Trace, phase: str, engine: str) -> tuple[Counter[int], Counter[int]]:
    read: Counter[int] = Counter()
    written: Counter[int] = Counter()
    for event in trace:
        if (event.phase, event.engine) == (phase, engine):
            read.update(event.read_bytes)
            written.update(event.write_bytes)
    return read, written


@pytest.mark.parametrize(
    "name", ["opt-1.3b", "llama-3-8b", "mixtral-8x7b", "mistral-7b", "gpt2-xl"]
)
def test_simulators_shape_has_the_models_parameters(name: str) -> None:
    """Two formulas for one number; the simulator leaves out biases and norms."""
    model = load_model(name)
    shape = model_shape(model)
    matrices = sum(t.elements for t in model.tensors() if t.kind in ("attention", "mlp"))
    assert shape.layers * shape.layer_params == pytest.approx(matrices, rel=1e-3)


def test_training_trace_moves_every_state_once() -> None:
    replay = Watched({"forward": 1.0, "backward": 1.0, "optimizer": 1.0})
    plan_training(replace(TRAINING, replay=replay, batch=1))
    (trace,) = replay.traces
    shape = model_shape(TRAINING.model)
    low = 2 * (shape.layers * shape.layer_params + shape.head_params)
    read, written = bytes_of(trace, "optimizer", "cpu")
    assert read.total() == 5 * 2 * low  # four fp32 values a parameter, and one to convert it
    assert written.total() == 3 * 2 * low + low  # three of them, and the low-precision copy
    assert bytes_of(trace, "backward", "d2h")[1].total() == 2 * low  # gradients, in fp32
    assert bytes_of(trace, "optimizer", "h2d")[0].total() == low


def test_training_passes_in_the_middle_count_as_one_of_them() -> None:
    """The plan has more than three passes: three are replayed, then two; the rest is arithmetic."""
    small = replace(TRAINING, gpu_usable=0.15)
    plan = plan_training(replace(small, replay=None))
    forward = plan.phases[0].terms["forward (GPU)"]
    backward = plan.phases[0].terms["backward (GPU)"]
    backward += plan.phases[0].terms["transfers that no work hides"]
    optimizer = plan.phases[0].seconds - forward - backward
    passes = plan.batch.count
    assert passes > 3
    # As the equations, but for forward, whose first pass takes three times a later one.
    each = forward / (passes + 2)
    two = {"forward": 4 * each, "backward": 2 * backward / passes, "optimizer": optimizer}
    three = {"forward": 5 * each, "backward": 3 * backward / passes, "optimizer": optimizer}
    assert said(plan_training(replace(small, replay=Watched(three, two))).notes) == []
    wrong = {**three, "optimizer": 1.2 * optimizer}
    off = {**two, "optimizer": 1.2 * optimizer}
    assert said(plan_training(replace(small, replay=Watched(wrong, off))).notes) == ["optimizer"]


PASSES = (1, 2, 3, 4, 8, 16, 61)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("model", ["opt-1.3b", "gpt2-xl", "opt-2.7b"])
def test_replay_of_accumulated_gradients_agrees_with_the_equations(
    model: str, stage: Literal[1, 2, 3]
) -> None:
    """Small micro-batches, whose copies outlast the backward, and large ones, which hide them."""
    machine, given = load_machine("epyc9354-cxl-a"), load_model(model)
    asked = TrainingRequest(model=given, machine=machine, batch=1, tokens=1, stage=stage)
    hardware, params = asked.hardware(), given.parameters
    for passes, tokens in itertools.product(PASSES, (64, 1024)):
        job = TrainingJob(model=given, batch=passes, tokens=tokens)
        share = assumed_training_share(machine.gpus[0].name)
        forward, backward = job.passes(hardware.gpu, share, micro=1, checkpointing=True)
        step = TrainingStep(
            kinds=host_kinds(params, stage, passes), stage=stage, forward_s=forward,
            backward_s=backward, accumulation=passes, cpu_bytes_per_s=100e9,
            edge=1 / (given.layers + 1),
        )  # fmt: skip
        found = place(step, hardware)
        assert found is not None
        weights, estimate = found
        work = planned_work(job, step, hardware, weights)
        replayed = replayed_phases(simulated_seconds, work, step, hardware, machine)
        by_equations = equation_phases(estimate)
        for phase in ("forward", "backward"):
            check = ReplayCheck(phase, by_equations[phase], replayed[phase])
            assert check.agrees, (passes, tokens, check.sentence())


def test_vllm_trace_moves_the_offloaded_layers() -> None:
    replay = Watched({"decode": 1.0})
    plan = plan_vllm(replace(SERVING, replay=replay))
    (trace,) = replay.traces
    read, _ = bytes_of(trace, "decode", "h2d")
    offloaded = {node: size for node, size in plan.node_bytes.items() if size}
    assert read == offloaded
    assert read.total() % layer_bytes(SERVING.model) == 0
    on_gpu = sum(event.accelerator_bytes for event in trace if event.engine == "gpu")
    kv = sum(
        SERVING.model.kv_bytes_per_token() * (300 + 50) * sequences
        for sequences in [
            float(note.split(", ")[1].split()[0]) for note in plan.notes if "GPU, " in note
        ]
    )
    read_weights = 2 * SERVING.model.parameters - SERVING.model.looked_up_bytes
    assert on_gpu == pytest.approx(read_weights + kv, rel=1e-2)


@pytest.mark.parametrize("engine", [plan_vllm, plan_inference])
def test_a_replay_charges_the_gpu_what_the_equations_do(engine: Callable[..., Plan]) -> None:
    """All on the GPU: its share of the memory's rate, and what a layer costs beside bytes."""
    replayed: list[Mapping[str, float]] = []

    def kept(trace: Trace, machine: Machine, engines: Engines) -> Mapping[str, float]:
        replayed.append(simulated_seconds(trace, machine, engines))
        return replayed[-1]

    few = {"most_sequences": 4} if engine is plan_vllm else {"most_batches": 1, "engine": "stock"}
    request = VllmRequest if engine is plan_vllm else InferenceRequest
    plan = engine(
        request(
            model=load_model("opt-6.7b"),
            machine=load_machine("spr3-h100"),
            prompt=300,
            generated=100,
            model_name="opt-6.7b",
            replay=kept,
            **few,
        )
    )
    assert plan.of("weights").keys() == {"gpu"}
    decode = plan.phases[-1]
    seconds = decode.terms["GPU work"] if engine is plan_vllm else decode.seconds
    assert replayed[-1]["decode"] == pytest.approx(seconds, rel=0.02)


def test_vllm_plan_says_where_a_replay_differs() -> None:
    terms = plan_vllm(SERVING).phases[0].terms
    step_s = terms["weight copies"] + terms["GPU work"]
    assert said(plan_vllm(replace(SERVING, replay=Watched({"decode": 1.09 * step_s}))).notes) == []
    notes = plan_vllm(replace(SERVING, replay=Watched({"decode": 0.85 * step_s}))).notes
    assert said(notes) == ["decode"]


def test_the_simulator_itself_replays_both() -> None:
    assert not any("not replayed" in note for note in plan_training(TRAINING).notes)
    notes = plan_vllm(SERVING).notes
    assert not any("not replayed" in note for note in notes)
    assert said(notes) == []


def test_what_the_replay_lacks_is_said() -> None:
    def lacking(trace: Trace, machine: Machine, engines: Engines) -> Mapping[str, float]:
        raise ConfigError("no write bandwidth of node 7")

    for notes in (
        plan_training(replace(TRAINING, replay=lacking)).notes,
        plan_vllm(replace(SERVING, replay=lacking)).notes,
    ):
        assert "not replayed: no write bandwidth of node 7" in notes


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "arguments",
    [
        ["training", "--model", "opt-1.3b", "--machine", "epyc9354-cxl-a", "--batch", "2"],
        ["inference", "--model", "opt-13b", "--machine", "epyc9354-cxl-a", "--max-batches", "2"],
        ["inference", "--model", "llama-3-70b", "--machine", "spr3-h100"],
    ],
)
def test_timeline_is_drawn(arguments: list[str], tmp_path: Path) -> None:
    picture = tmp_path / "timeline.png"
    done = CliRunner().invoke(app, ["plan", *arguments, "--timeline", str(picture)])
    assert done.exit_code == 0, done.output
    assert picture.read_bytes().startswith(b"\x89PNG")
