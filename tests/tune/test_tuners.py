"""Tuners against simulated workloads whose best share is known."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.sim.step_time import TwoTierStep
from cxl_offload.topology import load_machine
from cxl_offload.tune import (
    Bounds,
    Climb,
    ModelRule,
    ModelTuner,
    PublishedCaption,
    TierRatios,
    Tuner,
    Window,
    tier_ratios,
)
from cxl_offload.tune.curves import SHARES
from tests.tune.workloads import NoisyRun, published_ratios, random_step

SATURATED = TwoTierStep(
    latency_ns=(100.0, 220.0),
    bandwidth_bytes_per_s=(60e9, 40e9),
    lines_in_flight=600.0,
    memory_bytes=1e9,
)
IDLE = TwoTierStep(
    latency_ns=(100.0, 220.0),
    bandwidth_bytes_per_s=(250e9, 40e9),
    lines_in_flight=100.0,
    memory_bytes=1e9,
)
MAKERS: list[Callable[[], Tuner]] = [
    lambda: ModelTuner(TierRatios(0.4, 2.2)),
    Climb,
    PublishedCaption,
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", [0, 10, 20, 30])
def test_model_tuner_is_near_the_best_share_on_random_workloads(first: int) -> None:
    near_best = never_worse = 0
    for seed in range(first, first + 10):
        draw = np.random.default_rng(seed)
        step = random_step(draw)
        run = NoisyRun(step, seed=1000 + seed)
        last = run.tune(ModelTuner(published_ratios(step, draw)), 15)[-1]
        near_best += run.seconds(last) <= 1.03 * run.best()
        never_worse += run.seconds(last) <= 1.02 * run.seconds(0.0)
    assert near_best >= 9
    assert never_worse == 10


@pytest.mark.parametrize("make", MAKERS)
def test_tuner_leaves_the_far_tier_when_it_only_costs_latency(make: Callable[[], Tuner]) -> None:
    shares = NoisyRun(IDLE, seed=3, noise=0.005).tune(make(), 15)
    assert shares[-1] == 0.0


@pytest.mark.parametrize("make", MAKERS[:2])
def test_tuner_uses_the_far_tier_when_the_near_one_is_saturated(make: Callable[[], Tuner]) -> None:
    run = NoisyRun(SATURATED, seed=4, noise=0.005)
    last = run.tune(make(), 15)[-1]
    assert run.seconds(last) <= 1.03 * run.best()
    assert run.seconds(0.0) > 1.4 * run.best()  # the near tier alone would be much slower


def test_model_tuner_follows_a_workload_that_changes() -> None:
    tuner = ModelTuner(TierRatios(0.5, 2.2))
    NoisyRun(IDLE, seed=5).tune(tuner, 6)
    assert tuner.share == 0.0
    changed = NoisyRun(SATURATED, seed=6)
    last = changed.tune(tuner, 10)[-1]
    assert changed.seconds(last) <= 1.03 * changed.best()


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("bounds", [Bounds(0.0, 0.0), Bounds(0.2, 0.45), Bounds(0.31, 0.32)])
def test_tuner_never_leaves_the_bounds(make: Callable[[], Tuner], bounds: Bounds) -> None:
    tuner = make()
    run = NoisyRun(SATURATED, seed=7)
    widest_step = 0.1  # a share of the grid need not lie inside narrow bounds
    for _ in range(10):
        share = tuner.decide(run.window(tuner.share), bounds).share
        assert bounds.lowest - widest_step <= share <= bounds.highest + widest_step


@pytest.mark.parametrize("make", MAKERS)
def test_saved_tuner_goes_on_as_if_nothing_had_happened(make: Callable[[], Tuner]) -> None:
    run = NoisyRun(SATURATED, seed=8)
    first, second = make(), make()
    for _ in range(3):
        first.decide(run.window(first.share))
    second.restore(json.loads(json.dumps(first.saved())))
    for _ in range(5):
        window = run.window(first.share)
        assert first.decide(window) == second.decide(window)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"tuner": "another"},
        {"tuner": "model", "at": 99, "measured": {}},
        {"tuner": "model", "at": 0, "measured": {"0": [0.0, -1.0]}},
        {"tuner": "model", "at": 0, "measured": 3},
        {"tuner": "climb", "weight": 500, "step": 1, "previous_weight": 0, "previous": None},
        {"tuner": "climb", "weight": 1, "step": 1, "previous_weight": 0, "previous": 7},
    ],
)
def test_damaged_state_is_refused_in_one_line(make: Callable[[], Tuner], damaged: object) -> None:
    with pytest.raises(ConfigError, match="saved state"):
        make().restore(damaged)  # type: ignore[arg-type]


def test_regime_names_what_binds_the_step() -> None:
    def regime(step: TwoTierStep) -> str:
        tuner = ModelTuner(TierRatios(step.bandwidth_bytes_per_s[1] / 250e9, 2.2))
        NoisyRun(step, seed=9, noise=0.002).tune(tuner, 6)
        return tuner.regime

    compute = TwoTierStep(
        latency_ns=(100.0, 220.0), bandwidth_bytes_per_s=(250e9, 40e9), lines_in_flight=600.0,
        memory_bytes=1e7, compute_s=1.0,
    )  # fmt: skip
    assert regime(SATURATED) == "bandwidth"
    assert regime(compute) == "not memory"
    assert regime(IDLE) == "latency"
    full = ModelTuner(TierRatios(0.4, 2.2), start=0.5)
    full.decide(NoisyRun(SATURATED, seed=9).window(0.5), Bounds(0.3, 1.0))
    assert full.regime == "capacity"  # the near tier holds seven tenths of it at most
    assert ModelTuner(TierRatios(0.2, 2.0)).regime == "unknown"


def test_near_tier_is_measured_again_before_a_small_gain_is_believed() -> None:
    def settles_at(rule: ModelRule) -> float:
        tuner = ModelTuner(TierRatios(0.1, 2.2), rule)
        first = 1.035  # the one window of the near tier alone was slow by chance
        for _ in range(20):
            seconds = 1.0 if tuner.share == 0 else 1.011 + 0.3 * (tuner.share - SHARES[1])
            tuner.decide(Window(seconds * first, 0.011, 20))
            first = 1.0
        return tuner.share

    assert settles_at(ModelRule()) == 0.0
    assert settles_at(ModelRule(recheck=0.0)) > 0.0


def test_window_draws_outliers_in() -> None:
    calm = Window.of([1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.01])
    one_pause = Window.of([1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 30.0])
    assert abs(one_pause.mean_s - calm.mean_s) < 0.02
    with pytest.raises(ValueError, match="at least one, all from"):
        Window.of([1.0, 0.0])


def test_ratios_come_from_the_machine_file() -> None:
    machine = load_machine("epyc9354-cxl-a")
    ratios = tier_ratios(machine, [0], [2])
    assert ratios.bandwidth == pytest.approx(38.4 / 392)
    assert ratios.latency == pytest.approx(292 / 139)
    with pytest.raises(ConfigError, match="profile"):
        tier_ratios(load_machine("gh200"), [0], [1], initiator=99)


def test_shares_of_the_grid_begin_with_near_and_end_with_far_only() -> None:
    assert SHARES[0] == 0.0
    assert SHARES[-1] == 1.0
    assert list(SHARES) == sorted(set(SHARES))
