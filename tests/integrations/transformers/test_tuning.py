"""Weights and experts that move while a model computes: pages that moved, tokens that did not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import offload, phases, tuning
from cxl_offload.memory import Session
from cxl_offload.topology import load_machine
from cxl_offload.tune import StepRecording, decisions

from ..clock import FarIsSlow
from .models import VOCAB, generate, make

NEAR = 0
EXPERTS = {"experts": "bind:cxl"}


@pytest.fixture
def published() -> Iterator[Session]:
    """A machine whose bandwidths are known, which tuning by step time needs."""
    session = Session.simulated(load_machine("epyc9354-cxl-a"))
    yield session
    assert session.stats().asked_bytes.current == 0


def mixtral(family: type[PreTrainedModel] = MixtralForCausalLM) -> PreTrainedModel:
    """Two layers of eight experts of 24 KiB and more, so that each has pages of its own."""
    torch.manual_seed(5)
    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, pad_token_id=1,
        max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    model = family(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.mul_(4)
            if name.endswith("gate.weight"):
                weight[3:] *= 0.05  # the first three are asked for more often
    model.generation_config.eos_token_id = None
    return model


def bytes_of_experts(model: PreTrainedModel, experts: int) -> int:
    layer = model.model.layers[0].mlp.experts
    return experts * (layer.gate_up_proj[0].nbytes + layer.down_proj[0].nbytes)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_tokens_are_those_of_stock_while_experts_move(published: Session, experts: str) -> None:
    model = mixtral()
    model.set_experts_implementation(experts)
    stock = generate(model, max_new_tokens=80)
    room = bytes_of_experts(model, 6)
    with offload(
        model, EXPERTS, session=published, near_expert_bytes=room, tune_budget_bytes=1 << 30
    ) as done:
        assert torch.equal(generate(model, max_new_tokens=80), stock)
        parts = done.tuned.experts.parts
        assert 0 < len(parts.granted()) <= 6
        assert parts.granted() == parts.most_used.near
        assert 0 < parts.moved_bytes <= 0.01 * parts.asked_bytes
        near = published.stats().nodes[NEAR].current_bytes
        assert near <= room


def test_experts_asked_for_most_are_the_near_ones(published: Session) -> None:
    model = mixtral()
    counted = torch.zeros(2, 8)

    def count(at: int) -> Any:
        def hook(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            counted[at, args[1].unique()] += 1

        return hook

    hooks = [
        layer.mlp.experts.register_forward_pre_hook(count(at))
        for at, layer in enumerate(model.model.layers)
    ]
    room = bytes_of_experts(model, 4)
    with offload(
        model, EXPERTS, session=published, near_expert_bytes=room, tune_budget_bytes=1 << 30
    ) as done:
        generate(model, max_new_tokens=250)
        near = done.tuned.experts.parts.granted()
    for hook in hooks:
        hook.remove()
    best = counted.flatten().topk(4)
    hits = float(counted.flatten()[list(near)].sum())
    assert len(near) == 4
    assert hits >= 0.9 * float(best.values.sum())


def test_advice_only_without_a_budget(published: Session) -> None:
    model = mixtral()
    with offload(model, EXPERTS, session=published, near_expert_bytes=1 << 20) as done:
        generate(model, max_new_tokens=30)
        assert done.tuned.experts.parts.granted() == ()
        assert done.tuned.experts.parts.moved_bytes == 0


def test_counts_of_experts_survive_a_restart(published: Session, tmp_path: Path) -> None:
    model = mixtral()
    options = {
        "session": published,
        "near_expert_bytes": 1 << 20,
        "tune_state": tmp_path / "t.json",
    }
    with offload(model, EXPERTS, **options) as done:
        generate(model)
        before = done.tuned.experts.parts.most_used.saved()
    with offload(model, EXPERTS, **options) as done:
        assert done.tuned.experts.parts.most_used.saved() == before
    (tmp_path / "t.json.experts").write_text(json.dumps({"uses": [1], "rounds": 1}))
    with pytest.raises(ConfigError, match="16 items"), offload(model, EXPERTS, **options):
        pass


def test_models_and_options_that_do_not_fit_are_refused_in_one_line(published: Session) -> None:
    with (
        pytest.raises(ConfigError, match="no stacked experts"),
        offload(make("llama"), {"mlp": "bind:cxl"}, session=published, near_expert_bytes=1 << 20),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="no stacked experts in tiers"),
        offload(mixtral(), {"mlp": "bind:cxl"}, session=published, near_expert_bytes=1 << 20),
    ):
        pass
    with pytest.raises(ConfigError, match="without tune"):
        offload(make("llama"), {"mlp": "bind:cxl"}, session=published, tune_budget_bytes=5)
    with pytest.raises(ConfigError, match="threads belong to phases"):
        offload(
            make("llama"), {"mlp": "bind:cxl"}, session=published, tune="step_time",
            tune_threads=[1, 2],
        )  # fmt: skip
    with pytest.raises(ConfigError, match="at least 0"):
        offload(make("llama"), {"mlp": "bind:cxl"}, session=published, near_expert_bytes=-5)
    with pytest.raises(ConfigError, match="step_time"):
        offload(make("llama"), {"mlp": "bind:cxl"}, session=published, tune="bandwidth")  # type: ignore[arg-type]


def test_weights_follow_the_time_of_decode_steps(
    published: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FarIsSlow()
    monkeypatch.setattr(tuning, "time", clock)
    model = make("llama")
    stock = generate(model, max_new_tokens=60)
    spread = {"weights": "bind:cxl"}  # a tenth of the bandwidth: every tuner leaves it
    before = sum(one.count for one in decisions() if one.framework == "transformers")
    with offload(
        model, spread, session=published, tune="step_time", tune_budget_bytes=1 << 30,
        tune_state=tmp_path / "t.json",
    ) as done:  # fmt: skip
        tuner = done.tuned.weights.tuner
        # Simulated nodes are equally fast; on this clock they are not, whatever the machine does.
        clock.far_share = tuner.homes.granted
        assert tuner.homes.granted() == 1.0
        assert torch.equal(generate(model, max_new_tokens=60), stock)
        assert tuner.decisions >= 2
        assert tuner.homes.granted() < 1.0
        assert tuner.homes.granted() == pytest.approx(tuner.homes.share, abs=0.01)
    assert sum(one.count for one in decisions() if one.framework == "transformers") > before
    assert json.loads((tmp_path / "t.json").read_text())["tuner"] == "model"
    assert StepRecording.load(tmp_path / "t.json").windows[0][0] == 1.0


def test_prefill_and_decode_have_shares_and_threads_of_their_own(
    published: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FarIsSlow()
    monkeypatch.setattr(phases, "time", clock)
    model = make("llama")
    before = torch.get_num_threads()
    stock = generate(model, max_new_tokens=6)
    spread = {"weights": "bind:cxl"}
    state = tmp_path / "t.json"
    with offload(
        model, spread, session=published, tune="phase_time", tune_budget_bytes=1 << 30,
        tune_state=state, tune_threads=[1, 2],
    ) as done:  # fmt: skip
        steps = done.tuned.phases.steps
        clock.far_share = steps.homes.granted
        assert steps.homes.granted() == 1.0
        for _ in range(40):
            assert torch.equal(generate(model, max_new_tokens=6), stock)
        assert set(steps.tuner.shares) == {"prefill", "decode"}
        assert steps.homes.granted() < 1.0
        assert torch.get_num_threads() == 1  # a second one gains nothing on this clock
        clock.far_share = lambda: 0.0
        del steps
    assert torch.get_num_threads() == before
    saved = json.loads(state.read_text())
    assert saved["phases"]["tuner"] == "phases"
    assert saved["threads"]["decode"]["count"] == 1
    counted = {one.tuner for one in decisions() if one.framework == "transformers"}
    assert "phase" in counted


def test_weights_stay_without_a_budget(published: Session) -> None:
    model = make("llama")
    spread = {"weights": "bind:cxl"}
    with offload(model, spread, session=published, tune="step_time") as done:
        homes = done.tuned.weights.tuner.homes
        generate(model, max_new_tokens=40)
        assert homes.granted() == 1.0
