"""Hardware counters as a signal: fitted on recorded steps, or refused in one line."""

from __future__ import annotations

import errno
import math
from pathlib import Path

import numpy as np
import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.sim.step_time import TwoTierStep
from cxl_offload.tune import CounterEstimator, Counts, ModelTuner, StepCounters, TierRatios, Window
from cxl_offload.tune.counters import EVENTS
from cxl_offload.tune.curves import SHARES

STEP = TwoTierStep(
    latency_ns=(100.0, 220.0),
    bandwidth_bytes_per_s=(60e9, 40e9),
    lines_in_flight=600.0,
    memory_bytes=1e9,
)


class Simulated:
    """A kernel's counters, or one that has none for us."""

    def __init__(self, refuses: int = 0) -> None:
        self.refuses = refuses
        self.counted: dict[int, int] = {}
        self.closed: list[int] = []

    def open(self, event: str, thread: int) -> int:
        if self.refuses:
            raise OSError(self.refuses, "refused")
        self.counted[len(self.counted)] = 0
        return len(self.counted) - 1

    def read(self, descriptor: int) -> int:
        self.counted[descriptor] += 10 * (descriptor + 1)
        return self.counted[descriptor]

    def close(self, descriptor: int) -> None:
        self.closed.append(descriptor)


def counts_at(share: float, draw: np.random.Generator) -> Counts:
    """A saturated step: the longer it takes, the fewer instructions in a cycle."""
    instructions = 1_000_000_000
    cycles = STEP.seconds(share) * 3e9 * (1 + 0.01 * draw.standard_normal())
    return Counts(int(cycles), instructions, 20_000_000, 15_000_000)


def test_events_are_counted_from_step_to_step_and_closed() -> None:
    kernel = Simulated()
    counters = StepCounters(kernel)
    first, second = counters.step(), counters.step()
    assert first == second
    assert len(kernel.counted) % len(EVENTS) == 0
    assert first.cycles > 0
    counters.close()
    counters.close()
    assert sorted(kernel.closed) == sorted(kernel.counted)


@pytest.mark.parametrize(
    ("code", "message"),
    [(errno.EACCES, "perf_event_paranoid"), (errno.EPERM, "step_time"), (errno.ENOENT, "virtual")],
)
def test_kernel_that_refuses_is_named_in_one_line(code: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        StepCounters(Simulated(code))
    assert "\n" not in str(refused.value)


def test_this_machine_counts_or_says_why_not() -> None:
    refusal = ""
    try:
        counters = StepCounters()
    except ConfigError as refused:
        refusal = str(refused)
    if refusal:
        assert "tune by step_time" in refusal
        return
    sum(range(100_000))
    assert counters.step().instructions > 100_000
    counters.close()


@pytest.mark.slow(reason="simulates thousands of steps")
def test_tuner_by_counters_finds_the_share_that_step_times_would_find() -> None:
    draw = np.random.default_rng(1)
    shares = [0.0, 0.2, 0.4, 0.6, 1.0] * 4
    recorded = [counts_at(share, draw) for share in shares]
    fit = CounterEstimator.fit(recorded, [STEP.seconds(share) for share in shares])
    assert fit.error < 0.05
    tuner = ModelTuner(TierRatios(0.6, 2.2))
    for _ in range(10):
        steps = [fit.seconds(counts_at(tuner.share, draw)) for _ in range(20)]
        tuner.decide(Window.of(steps))
    best = min(STEP.seconds(share) for share in SHARES)
    assert STEP.seconds(tuner.share) <= 1.03 * best
    assert STEP.seconds(0.0) > 1.2 * best


def test_fit_survives_a_restart_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "fit.json"
    fit = CounterEstimator(1.0, (2.0, 3.0, 4.0), 0.1)
    fit.save(file)
    assert CounterEstimator.load(file) == fit
    assert CounterEstimator(-1.0, (0.0, 0.0, 0.0), 0.1).seconds(Counts(1, 1, 1, 1)) == math.inf
    for text in ('{"intercept": 1}', '{"intercept": 1, "weights": [1], "error": 0}', "{", "[]"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"fit\.json"):
            CounterEstimator.load(file)
    with pytest.raises(ConfigError, match="none"):
        CounterEstimator.load(tmp_path / "none.json")
    with pytest.raises(ValueError, match="five or more"):
        CounterEstimator.fit([Counts(1, 1, 1, 1)], [1.0])
