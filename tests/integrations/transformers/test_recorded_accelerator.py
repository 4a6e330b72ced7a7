"""Generations on an accelerator that is not there, recorded; formulas and plans say the bytes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cxl_offload import _C
from cxl_offload.integrations import fit
from cxl_offload.integrations.transformers import Offloaded, offload
from cxl_offload.integrations.transformers.accelerator_trace import recorder_for
from cxl_offload.memory import Session
from cxl_offload.plan.decoding.engine import TRANSFORMERS
from cxl_offload.plan.decoding.trace import cpu_engines, planned_trace
from cxl_offload.plan.transformers.plan import Transformers, plan_transformers
from cxl_offload.sim import replay
from cxl_offload.sim.trace import Trace
from cxl_offload.topology import load_machine

from .commands import MACHINE, command, run
from .conftest import machine
from .fake_accelerator import FakeCopies, fake_accelerator, pinning_session
from .models import generate, make
from .test_planned_gpu import LAYERS, SOME_LAYERS, answers, llama, request_for
from .test_planned_gpu import MACHINE as PLANNED
from .test_planned_gpu import NEW as PLANNED_NEW

ROWS, PROMPT, NEW = 4, 20, 10
FAR = {"weights": "bind:2", "kv": "bind:0", "activations": "bind:1"}
POSITION = 2 * 2 * ROWS * 2 * 16 * 4
"""Bytes of keys and values of a position: two layers, two heads of 16."""
QUERIES = 2 * ROWS * 4 * 16 * 4
"""Of the queries of a token, and of what attention makes of them."""


@pytest.fixture
def session(driver: _C.FakeDriver, accelerator: str) -> Iterator[Session]:
    with pinning_session(machine(), driver) as session:
        yield session


def recorded(
    model: PreTrainedModel, session: Session, policies: Any, **options: Any
) -> tuple[Trace, Offloaded]:
    block = offload(model, policies, accelerator="cuda", session=session, **options)
    recorder = recorder_for(session, block._device, block.calls, block.rows_at_once)
    with block as done, recorder.following(model):
        generate(model)
    return recorder.trace, done


def by_node(trace: Trace, what: str, **wanted: str) -> Counter[int]:
    """Bytes of the events whose columns are as wanted."""
    found: Counter[int] = Counter()
    for event in trace:
        if all(getattr(event, name) == value for name, value in wanted.items()):
            found.update(getattr(event, what))
    return found


def streamed(model: PreTrainedModel) -> int:
    tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    return sum(w.nbytes for w in model.parameters() if not any(w is t for t in tables))


@pytest.mark.parametrize("rows", [None, 3])
def test_copies_are_those_of_the_streams_by_phase(rows: int | None, session: Session) -> None:
    model = make("llama")
    policies = {kind: at for kind, at in FAR.items() if rows or kind != "activations"}
    trace, done = recorded(model, session, policies, rows_at_once=rows)
    weights = {"engine": "h2d", "tensor_kind": "weights"}
    each, first = streamed(model), sum(w.nbytes for w in model.model.layers[0].parameters())
    prompt = by_node(trace, "read_bytes", phase="prefill", **weights)
    assert prompt == {2: each + first}  # the first layer of the next token is on its way
    assert by_node(trace, "read_bytes", phase="decode", **weights) == {2: (NEW - 1) * each}
    assert done.streamed is not None
    assert done.streamed.copied_bytes == NEW * each + first
    came = by_node(trace, "read_bytes", engine="h2d", queue="hidden")
    went = by_node(trace, "write_bytes", engine="d2h", queue="hidden")
    if rows is None:  # what the CPU has looked up crosses
        assert (came, went) == ({0: ROWS * 64 * 4 * (PROMPT + NEW - 1)}, {})
        return
    assert done.streamed_states is not None
    assert came == {1: done.streamed_states.copied_in_bytes}
    assert went == {1: done.streamed_states.copied_out_bytes}
    looked_up = by_node(trace, "write_bytes", engine="cpu", queue="hidden")
    assert looked_up == {1: ROWS * 64 * 4 * (PROMPT + NEW - 1)}


def test_cache_is_read_by_cpus_and_stored_over_the_link(session: Session) -> None:
    trace, _ = recorded(make("llama"), session, FAR, rows_at_once=3)
    kv = {"tensor_kind": "kv"}
    seen = sum(PROMPT + token for token in range(1, NEW))
    assert by_node(trace, "read_bytes", engine="cpu", **kv) == {0: seen * POSITION}
    for phase, tokens in (("prefill", PROMPT), ("decode", NEW - 1)):
        stored = by_node(trace, "write_bytes", engine="d2h", phase=phase, **kv)
        assert stored == {0: tokens * POSITION}
    for engine, what in (("d2h", "write_bytes"), ("h2d", "read_bytes")):
        crossed = by_node(trace, what, engine=engine, queue="compute", tensor_kind="act")
        assert crossed == {0: (NEW - 1) * QUERIES}
    assert trace.tokens == {"prefill": ROWS * PROMPT, "decode": ROWS * (NEW - 1)}


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_part_of_the_cache_on_the_accelerator_is_read_there(share: float, session: Session) -> None:
    policies = {"weights": "bind:2", "kv": "bind:0"}
    trace, done = recorded(make("llama"), session, policies, accelerator_kv=share)
    there = sum(
        event.accelerator_bytes
        for event in trace
        if (event.engine, event.tensor_kind, event.phase) == ("gpu", "kv", "decode")
    )
    here = by_node(trace, "read_bytes", engine="cpu", tensor_kind="kv", phase="decode")[0]
    assert there + here == sum(PROMPT + token for token in range(1, NEW)) * POSITION
    assert (here > 0) is (share < 1)
    assert (done.calls.joined > 0) is (share < 1)


def test_weights_that_stay_are_not_copied(session: Session) -> None:
    """The control: nothing is streamed, and a table that is there is not read by CPUs."""
    trace, _ = recorded(make("llama"), session, {"weights": "gpu", "kv": "bind:0"})
    assert not by_node(trace, "read_bytes", tensor_kind="weights")
    assert any(event.engine == "gpu" and event.tensor_kind == "weights" for event in trace)


def test_copies_outside_of_the_recording_are_left_out(session: Session) -> None:
    model = make("llama")
    block = offload(model, FAR, accelerator="cuda", rows_at_once=3, session=session)
    recorder = recorder_for(session, block._device, block.calls, block.rows_at_once)
    with block:
        generate(model)
        assert len(recorder.trace) == 0
        with recorder.following(model, wanted=False):
            generate(model)
    assert len(recorder.trace) == 0


@pytest.mark.parametrize("tiers", [None, ("ldram",)])
def test_bytes_are_those_that_the_plan_replays(
    tiers: tuple[str, ...] | None, tmp_path: Path, driver: _C.FakeDriver, accelerator: str
) -> None:
    """To the byte, on every node and over the link.

    The run has two things more: the first layer of the next token is on its way when a phase ends,
    and queries cross for attention on CPUs, which the plan charges as calls. A cache that is too
    small for a cycle of granules lies on one node, where a plan counts its shares, in whole bytes a
    layer.
    """
    request = request_for(tmp_path, llama(), **{**SOME_LAYERS, "tiers": tiers})
    plan, executor = plan_transformers(request), Transformers(request)
    found = executor.search(executor.hardware())
    assert found is not None
    expected = planned_trace(executor.job, found.hardware, executor.block(found))
    fake_session = Session.simulated(PLANNED, driver=driver)
    model = llama(torch.float16)
    block = offload(model, plan, accelerator="cuda", session=fake_session)
    recorder = recorder_for(fake_session, block._device, block.calls, block.rows_at_once)
    with block, recorder.following(model):
        answers(model, plan.batch.size * plan.batch.count)
    run = recorder.trace
    steps = PLANNED_NEW - 1
    for phase, what, count, wanted in (
        ("decode", "read_bytes", steps, {"engine": "h2d", "tensor_kind": "weights"}),
        ("decode", "read_bytes", steps, {"engine": "cpu", "tensor_kind": "kv"}),
        ("prefill", "write_bytes", 1, {"tensor_kind": "kv"}),
    ):
        token = by_node(expected, what, phase=phase, **wanted)
        planned = {node: count * nbytes for node, nbytes in token.items()}
        found_there = by_node(run, what, phase=phase, **wanted)
        if len(planned) > 1 and wanted["tensor_kind"] == "kv":
            rounded = count * LAYERS * len(planned)
            assert sum(found_there.values()) == pytest.approx(sum(planned.values()), abs=rounded)
        else:
            assert found_there == planned != {}
    weights = {"engine": "h2d", "tensor_kind": "weights", "phase": "prefill"}
    once, planned = (by_node(each, "read_bytes", **weights) for each in (run, expected))
    first = sum((once - planned).values())
    assert 0 < first <= sum(w.nbytes for w in model.model.layers[0].parameters())
    timeline = replay(run, PLANNED, engines=cpu_engines(PLANNED, TRANSFORMERS))
    assert timeline.tokens_per_s["decode"] > 0


def test_command_line_saves_and_replays_the_trace_of_an_accelerator(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, file, trace = _C.FakeDriver(), tmp_path / "report.json", tmp_path / "run.json"
    session = Session.simulated(load_machine(MACHINE), driver=driver)
    monkeypatch.setattr(fit, "session_on", lambda *_: session)
    fake_accelerator(monkeypatch, lambda session: FakeCopies(session, driver))
    places = ["--place", "weights=cxl", "--place", "kv=ldram", "--place", "activations=cxl"]
    asked = [*places, "--rows-at-once", "1", "--gen-len", "4", "--accelerator", "cuda"]
    written = ["--trace", str(trace), "--output", str(file)]
    assert run(command(folder, *asked, "--warmup", *written)) == 0
    report, loaded = json.loads(file.read_text()), Trace.load(trace)
    assert loaded.tokens == {"prefill": 2 * report["prompt_len"], "decode": 2 * 3}
    each = streamed(make("llama"))
    copied = by_node(loaded, "read_bytes", engine="h2d", tensor_kind="weights", phase="decode")
    assert sum(copied.values()) == 3 * each
    assert report["simulated"]["tokens_per_s"]["decode"] > 0
