"""Attention, whose arithmetic grows with the square of a sequence, in plans of training.

The arithmetic is counted here a second way: matrix by matrix, and scores query by query.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cxl_offload.plan.model.config import ModelConfig
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import Plan
from cxl_offload.plan.training.job import TrainingJob
from cxl_offload.plan.training.plan import TrainingRequest, plan_training
from cxl_offload.topology import load_machine

LENGTHS = (512, 4096, 16_384, 65_536, 131_072, 196_608)


def small_qwen(vocab: int = 32_000, **changes: Any) -> ModelConfig:
    sizes = {
        "layers": 24, "hidden": 896, "heads": 14, "kv_heads": 2, "head_dim": 64, "ffn": 4864,
        "embed_dim": 896, "positions": 1 << 20, "tied": True, "vocab": vocab,
    }  # fmt: skip
    return replace(load_model("qwen2-7b"), **{**sizes, **changes})


def plan(model: ModelConfig, machine: str, tokens: int, **extra: Any) -> Plan:
    given: dict[str, Any] = {"batch": 4, "flash_attention": True, "replay": None, **extra}
    return plan_training(
        TrainingRequest(model=model, machine=load_machine(machine), tokens=tokens, **given)
    )


def forward_by_hand(model: ModelConfig, tokens: int) -> float:
    """Multiplications and additions: matrices of ``config.json``, and causal scores and values."""
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    layer = model.hidden * (2 * q + 2 * kv + 3 * model.ffn)
    products = 2 * tokens * (model.layers * layer + model.vocab * model.hidden)
    pairs = sum(range(1, tokens + 1))
    return products + model.layers * 2 * 2 * pairs * q


@pytest.mark.parametrize("vocab", [32_000, 151_936])
@pytest.mark.parametrize("machine", ["gh200", "spr3-h100"])
def test_no_length_of_sequences_beats_the_peak(machine: str, vocab: int) -> None:
    model, gpu = small_qwen(vocab), load_machine(machine).gpus[0]
    assert gpu.peak_flops_per_s
    for tokens in LENGTHS if vocab < 100_000 else LENGTHS[:3]:
        least = 3 * forward_by_hand(model, tokens) / tokens / gpu.peak_flops_per_s
        assert 1 / plan(model, machine, tokens).tokens_per_s >= least, tokens


def test_logits_that_the_gpu_cannot_hold_are_refused() -> None:
    """Fp32 logits of 65,536 tokens over 151,936 words are 40 GB, and twice with their gradient."""
    with pytest.raises(MemoryError, match="one sequence needs"):
        plan(small_qwen(151_936), "gh200", LENGTHS[3])


def test_without_scores_a_long_plan_would_beat_the_peak() -> None:
    """The control: what parameters alone multiply is less than half at the longest."""
    model = small_qwen()
    alone = 2 * model.multiplied_parameters * LENGTHS[-1]
    assert forward_by_hand(model, LENGTHS[-1]) > 5 * alone


@pytest.mark.parametrize("flash", [False, True])
def test_a_longer_sequence_takes_longer_for_each_token_of_the_gpu(flash: bool) -> None:
    """A step is longer, and so is a token's part of its forward and backward."""
    steps, tokens_each = [], []
    for tokens in LENGTHS if flash else LENGTHS[:3]:
        made = plan(small_qwen(), "gh200", tokens, flash_attention=flash, batch=1)
        terms = made.phases[0].terms
        steps.append(made.phases[0].seconds)
        tokens_each.append((terms["forward (GPU)"] + terms["backward (GPU)"]) / tokens)
    assert steps == sorted(steps)
    assert tokens_each == sorted(tokens_each)
    assert tokens_each[-1] > 1.5 * tokens_each[0]


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_arithmetic_of_a_step_is_that_of_its_matrices_and_scores(tokens: int) -> None:
    model = small_qwen(attention_bias=False)
    norms = sum(t.elements for t in model.tensors() if t.kind == "norm")
    job = TrainingJob(model=model, batch=1, tokens=tokens, flash_attention=True)
    forward, backward = job.flops(checkpointing=False)
    by_hand = forward_by_hand(model, tokens)
    assert forward == pytest.approx(by_hand + 2 * norms * tokens)
    scores = model.layers * 4 * sum(range(1, tokens + 1)) * model.heads * model.head_dim
    assert backward == pytest.approx(2 * forward + scores / 2)  # one product more: the scores
    logits = 2 * tokens * model.vocab * model.hidden
    assert job.flops(checkpointing=True)[1] == pytest.approx(backward + forward - logits)


def test_a_window_drops_the_scores_that_it_does_not_see() -> None:
    tokens, window = 50, 12
    model = small_qwen(window=window, windowed_layers=18)
    job = TrainingJob(model=model, batch=1, tokens=tokens, flash_attention=True)
    near = sum(min(at + 1, window) for at in range(tokens))
    full = sum(range(1, tokens + 1))
    assert job.attended * tokens == pytest.approx((18 * near + 6 * full) / 24)
    wide = replace(job, model=small_qwen(window=tokens, windowed_layers=18))
    assert wide.attended == replace(job, model=small_qwen()).attended


def test_attention_that_keeps_scores_and_encoders_compute_all_of_them() -> None:
    keeps = TrainingJob(model=small_qwen(), batch=1, tokens=100)
    encoder = TrainingJob(
        model=load_model("bert-base-uncased"), batch=1, tokens=100, flash_attention=True
    )
    assert keeps.attended == encoder.attended == 100
    assert replace(keeps, flash_attention=True).attended == 50.5


def test_equations_and_replay_agree_on_long_sequences() -> None:
    for tokens in (4096, 65_536):
        made = plan_training(
            TrainingRequest(
                model=small_qwen(), machine=load_machine("epyc9354-cxl-a"), batch=2,
                tokens=tokens, flash_attention=True,
            )
        )  # fmt: skip
        assert not any("the equations say" in note for note in made.notes), made.notes
        assert not any("not replayed" in note for note in made.notes)


def test_a_short_pass_lasts_as_long_as_the_gpu_reads_its_weights() -> None:
    """One sequence of 16 tokens: every weight is read forward, and twice backward."""
    machine = load_machine("spr3-h100")
    memory = machine.gpus[0].memory_bandwidth_bytes_per_s
    model = load_model("opt-6.7b")
    made = plan(model, "spr3-h100", 16, batch=1)
    assert memory
    weights = 2 * sum(t.elements for t in model.tensors() if t.kind in ("attention", "mlp"))
    terms = made.phases[0].terms
    assert terms["forward (GPU)"] >= weights / memory
    assert terms["backward (GPU)"] >= 2 * weights / memory
    assert terms["forward (GPU)"] < 1.5 * weights / memory
