"""Generations recorded as events: bytes against formulas of their own, and what a replay says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from cxl_offload.integrations.transformers import offload
from cxl_offload.integrations.transformers.run_trace import RunTrace
from cxl_offload.memory import Session
from cxl_offload.ops import shared_cpus
from cxl_offload.plan.decoding.engine import TRANSFORMERS
from cxl_offload.plan.decoding.trace import cpu_engines
from cxl_offload.sim import replay
from cxl_offload.sim.trace import Trace
from cxl_offload.topology import load_machine

from ..always_shared import always_shared
from .commands import command, run
from .models import generate, make

ROWS, PROMPT, NEW = 4, 20, 10
PLACES = {"weights": "bind:2", "norm": "bind:1", "kv": "bind:0"}


def recorded(model: PreTrainedModel, session: Session, places: dict[str, str]) -> Trace:
    recorder = RunTrace(session)
    with offload(model, places, session=session), recorder.following(model):
        generate(model)
    return recorder.trace


def by_node(trace: Trace, phase: str, kind: str, what: str) -> Counter[int]:
    found: Counter[int] = Counter()
    for event in trace:
        if (event.phase, event.tensor_kind) == (phase, kind):
            found.update(getattr(event, what))
    return found


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_bytes_are_those_of_the_model_and_its_cache(family: str, session: Session) -> None:
    model = make(family)
    trace = recorded(model, session, PLACES)
    norms = sum(w.nbytes for name, w in model.named_parameters() if "norm" in name or "ln_" in name)
    tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    rest = sum(w.nbytes for w in model.parameters()) - norms - sum(t.nbytes for t in tables)
    steps = NEW - 1
    read = by_node(trace, "decode", "weights", "read_bytes")
    assert read[1] == steps * norms
    # A row a sequence of the words, and of the positions one or as many.
    assert steps * rest <= read[2] <= steps * (rest + len(tables) * ROWS * 64 * 4)
    assert by_node(trace, "prefill", "weights", "read_bytes")[1] == norms
    heads, dim = (2, 16) if family == "llama" else (4, 16)
    position = 2 * 2 * ROWS * heads * dim * 4
    seen = sum(PROMPT + token for token in range(1, NEW))
    assert by_node(trace, "decode", "kv", "read_bytes") == {0: seen * position}
    assert by_node(trace, "decode", "kv", "write_bytes") == {0: steps * position}
    assert by_node(trace, "prefill", "kv", "write_bytes") == {0: PROMPT * position}
    assert by_node(trace, "prefill", "kv", "read_bytes") == {}
    assert trace.tokens == {"prefill": ROWS * PROMPT, "decode": ROWS * steps}


def test_products_and_attention_are_counted_by_their_operations(session: Session) -> None:
    model = make("llama")
    trace = recorded(model, session, PLACES)
    inside = sum(weight.numel() for weight in model.model.layers.parameters())
    of_layers = sum(
        event.flops
        for event in trace
        if event.phase == "decode" and event.tensor_kind == "weights" and event.flops
    )
    beside = model.lm_head.weight.numel() + model.model.norm.weight.numel()
    scale = TRANSFORMERS.attention_flops_per_core / TRANSFORMERS.products_flops_per_core
    expected = 2 * (inside + beside) * ROWS * (NEW - 1) * scale
    assert of_layers == pytest.approx(expected)


def test_experts_count_as_tokens_ask_for_them(session: Session) -> None:
    """Two of four for a token of one sequence; nearly all for a prompt of many."""
    model = make("mixtral")
    recorder = RunTrace(session)
    with offload(model, PLACES, session=session), recorder.following(model), torch.no_grad():
        cache = model(torch.arange(3, 63).reshape(1, 60)).past_key_values
        model(torch.tensor([[9]]), past_key_values=cache)
        stacks = [w.nbytes for n, w in model.named_parameters() if "experts" in n]
    rest = sum(
        w.nbytes
        for name, w in model.named_parameters()
        if "experts" not in name and "embed" not in name and "norm" not in name
    )
    decode = by_node(recorder.trace, "decode", "weights", "read_bytes")[2]
    prompt = by_node(recorder.trace, "prefill", "weights", "read_bytes")[2]
    assert decode - rest == pytest.approx(sum(stacks) / 2 + 64 * 4, rel=0.01)
    assert prompt - rest == pytest.approx(sum(stacks) + 60 * 64 * 4, rel=0.01)


def test_replay_of_a_far_placement_takes_longer() -> None:
    machine, found = load_machine("epyc9354-cxl-a"), {}
    for tier in ("ldram", "cxl"):
        session = Session.simulated(machine)
        trace = recorded(make("llama"), session, {"weights": tier, "kv": tier})
        timeline = replay(trace, machine, engines=cpu_engines(machine, TRANSFORMERS))
        found[tier] = timeline.tokens_per_s
    assert found["ldram"]["decode"] > 1.5 * found["cxl"]["decode"] > 0
    assert found["ldram"]["prefill"] >= found["cxl"]["prefill"] > 0


def test_nothing_is_recorded_where_nobody_asked(session: Session) -> None:
    model, recorder = make("llama"), RunTrace(session)
    with offload(model, PLACES, session=session), recorder.following(model, wanted=False):
        generate(model)
    assert len(recorder.trace) == 0
    assert not any(module._forward_hooks for module in model.modules())


def test_command_line_replays_on_simulated_nodes_and_saves_the_trace(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for tier in ("ldram", "cxl"):
        file, trace, page = (tmp_path / f"{tier}.{end}" for end in ("json", "trace", "html"))
        places = ("--place", f"weights={tier}", "--place", f"kv={tier}", "--gen-len", "4")
        asked = ("--output", str(file), "--trace", str(trace), "--report", str(page))
        assert run(command(folder, *places, *asked)) == 0
        report = json.loads(file.read_text())
        found[tier] = report["simulated"]["tokens_per_s"]["decode"]
        loaded = Trace.load(trace)
        assert loaded.tokens == {"prefill": 2 * report["prompt_len"], "decode": 2 * 3}
        assert "Timeline of the first steps of decode" in page.read_text()
        assert "Speed (simulated: the bytes of this run replayed" in capsys.readouterr().out
    assert found["ldram"] > found["cxl"]


def test_command_line_says_that_other_programs_wanted_the_cpus(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_cpus, "_watch", always_shared)
    file, page = tmp_path / "run.json", tmp_path / "run.html"
    asked = ("--place", "kv=ldram", "--gen-len", "2", "--output", str(file), "--report", str(page))
    assert run(command(folder, *asked)) == 0
    (note,) = json.loads(file.read_text())["speed_notes"]
    assert note.startswith("other programs wanted this one's CPUs for")
    assert note in " ".join(capsys.readouterr().out.split())
    assert "other programs wanted this one" in page.read_text()
