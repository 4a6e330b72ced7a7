"""Requests that all come at once."""

from __future__ import annotations

from typing import Any

import pytest

from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.vllm.plan import VllmRequest, plan_vllm
from cxl_offload.topology import load_machine
from cxl_offload.validation.wave import serve_wave, spread_lengths


def request(**extra: Any) -> VllmRequest:
    return VllmRequest(
        model=load_model("llama-3-8b"), machine=load_machine("spr3-h100"), prompt=300,
        generated=100, model_name="llama-3-8b", replay=None, **extra,
    )  # fmt: skip


def test_lengths_are_spread_as_asked_and_the_same_each_time() -> None:
    lengths = spread_lengths(4000, 200.0, 10_000)
    assert lengths == spread_lengths(4000, 200.0, 10_000)
    assert sum(lengths) / 4000 == pytest.approx(200, rel=0.02)
    beyond = sum(each > 400 for each in lengths) / 4000
    assert beyond == pytest.approx(2.718281828**-2, rel=0.03)  # exponential
    assert sum(lengths[:400]) / 400 == pytest.approx(200, rel=0.1)  # in no order
    assert max(spread_lengths(4000, 200.0, 500)) == 500


def test_a_long_wave_is_as_fast_as_the_plan() -> None:
    wanted = request(most_sequences=16)
    wave = serve_wave(wanted, 1600)
    assert wave.tokens_per_s == pytest.approx(plan_vllm(wanted).tokens_per_s, rel=0.03)
    assert wave.seconds == pytest.approx(1600 * 100 / wave.tokens_per_s)


def test_a_wave_that_runs_at_once_takes_its_prompts_and_the_steps_of_one_answer() -> None:
    wave = serve_wave(request(), 40)
    assert len(wave.served) == 40
    assert len({each.per_token for each in wave.served}) <= 2  # prompts take two steps
    assert wave.first_token_s < wave.seconds / 3
    assert wave.per_token_s * 99 < wave.seconds


def test_answers_of_unlike_length_end_later() -> None:
    wanted = request(most_sequences=64)
    assert serve_wave(wanted, 200, spread=True).seconds > serve_wave(wanted, 200).seconds


@pytest.mark.parametrize("count", [0, -1, 100_001])
def test_numbers_of_requests_that_mean_nothing_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="requests at once: 1 to 100000"):
        serve_wave(request(), count)
