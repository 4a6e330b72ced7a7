"""Shares of cycles of phases: exact against brute force, learned against the simulator."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from cxl_offload.sim.step_time import TwoTierStep
from cxl_offload.tune import Bounds, PhaseTuner, TierRatios, cycle_shares
from cxl_offload.tune.curves import SHARES
from tests.tune.workloads import NoisyRun

READS = TwoTierStep(  # saturates the near tier: gains from both
    latency_ns=(100.0, 220.0),
    bandwidth_bytes_per_s=(60e9, 40e9),
    lines_in_flight=600.0,
    memory_bytes=6e9,
)
CHASES = TwoTierStep(  # few lines in flight: loses with every far page
    latency_ns=(100.0, 220.0),
    bandwidth_bytes_per_s=(60e9, 40e9),
    lines_in_flight=20.0,
    memory_bytes=2e9,
)


def brute_force(times: np.ndarray, whole_move_s: float) -> float:
    best = math.inf
    for path in itertools.product(range(times.shape[1]), repeat=len(times)):
        ring = zip(path, (*path[1:], path[0]), strict=True)
        moves = sum(abs(SHARES[a] - SHARES[b]) * whole_move_s for a, b in ring if a != b)
        best = min(best, moves + sum(row[at] for row, at in zip(times, path, strict=True)))
    return best


@pytest.mark.parametrize("seed", range(20))
def test_cycle_is_the_best_of_all_cycles(seed: int) -> None:
    draw = np.random.default_rng(seed)
    phases = int(draw.integers(1, 4))
    times = draw.uniform(0.1, 3.0, (phases, 6))
    whole_move_s = float(draw.choice([0.0, 0.3, 5.0, 100.0]))
    chosen = cycle_shares(times, whole_move_s=whole_move_s)
    assert chosen.seconds == pytest.approx(brute_force(times, whole_move_s))
    assert chosen.fixed_seconds == pytest.approx(times.sum(axis=0).min())
    assert chosen.seconds <= chosen.fixed_seconds + 1e-12


def test_no_moves_where_they_are_not_possible() -> None:
    times = [[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]
    assert not cycle_shares(times, whole_move_s=math.inf).moves
    assert cycle_shares(times, whole_move_s=0.0).moves
    with pytest.raises(ValueError, match="need >= 0"):
        cycle_shares([[1.0, -1.0]], whole_move_s=1.0)


def run_cycles(whole_move_s: float, cycles: int = 12) -> tuple[PhaseTuner, float, float, float]:
    """The tuner, its last cycle, the best fixed one and the best with a share for each phase."""
    runs = {"read": NoisyRun(READS, seed=1), "chase": NoisyRun(CHASES, seed=2)}
    steps = {"read": 30, "chase": 30}
    tuner = PhaseTuner(TierRatios(0.6, 2.1), list(runs), whole_move_s=whole_move_s)
    for _ in range(cycles):
        windows = {phase: run.window(tuner.shares[phase]) for phase, run in runs.items()}
        tuner.decide(windows, steps)
    truth = np.array([[run.seconds(s) * steps[p] for s in SHARES] for p, run in runs.items()])
    best = cycle_shares(truth, whole_move_s=whole_move_s)
    at = [SHARES.index(tuner.shares[phase]) for phase in runs]
    moved = 2 * abs(SHARES[at[0]] - SHARES[at[1]]) * whole_move_s if at[0] != at[1] else 0.0
    last = float(truth[0, at[0]] + truth[1, at[1]] + moved)
    return tuner, last, best.fixed_seconds, best.seconds


def test_phases_get_their_own_shares_when_moves_are_cheap() -> None:
    tuner, last, fixed, best = run_cycles(whole_move_s=0.05)
    assert tuner.shares["read"] > tuner.shares["chase"] == 0.0
    assert fixed - last >= 0.8 * (fixed - best)


def test_phases_share_one_placement_when_moves_cost_more() -> None:
    tuner, last, fixed, _ = run_cycles(whole_move_s=50.0)
    assert len(set(tuner.shares.values())) == 1
    assert last <= 1.03 * fixed


def test_phase_tuner_keeps_to_the_bounds() -> None:
    tuner = PhaseTuner(TierRatios(0.6, 2.1), ["read"], whole_move_s=1.0)
    run = NoisyRun(READS, seed=3)
    for _ in range(6):
        shares, reason = tuner.decide({"read": run.window(tuner.shares["read"])}, {"read": 1},
                                      Bounds(0.0, 0.2))  # fmt: skip
        assert shares["read"] <= 0.2
        assert reason
    with pytest.raises(ValueError, match="each once"):
        PhaseTuner(TierRatios(0.6, 2.1), ["a", "a"], whole_move_s=1.0)
