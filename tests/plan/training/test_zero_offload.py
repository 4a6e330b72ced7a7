from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxl_offload.plan.training import zero_offload

times = st.floats(0, 10)


@given(times, times, times, times, times)
def test_step_equals_a_timeline_of_its_events(
    forward: float, backward: float, gradients: float, parameters: float, optimizer: float
) -> None:
    step = zero_offload.step_times(
        zero_offload.StepInputs(forward, backward, gradients, parameters, optimizer)
    )
    start_of_backward = forward
    gradients_done = start_of_backward + gradients
    optimizer_done = max(start_of_backward + backward, gradients_done) + optimizer
    assert step.step_s == pytest.approx(optimizer_done + parameters)
    assert step.exposed_transfer_s == pytest.approx(step.step_s - forward - backward - optimizer)
    assert 0 <= step.optimizer_share <= 1


def optimizer(
    shares: list[float], rate: float = 100e9, latencies: list[float] | None = None
) -> float:
    return zero_offload.optimizer_seconds(
        280e9,
        cpu_bytes_per_s=rate,
        cores=32,
        bandwidth_bytes_per_s=[400e9, 40e9],
        latency_ns=latencies or [140, 290],
        local_latency_ns=140,
        shares=shares,
    )


def test_optimizer_on_local_memory_runs_at_its_own_rate() -> None:
    assert optimizer([1.0, 0.0]) == pytest.approx(2.8)


def test_optimizer_with_a_saturated_tier_runs_at_that_tiers_rate() -> None:
    assert optimizer([0.0, 1.0]) == pytest.approx(7.0)


def test_optimizer_below_saturation_pays_one_latency_a_page_on_every_core() -> None:
    pages = 280e9 / 4096
    paid = pages * 0.1 * 150e-9 / 32
    assert optimizer([0.9, 0.1]) == pytest.approx(2.8 + paid)


@given(st.floats(0, 1), st.floats(0, 1))
def test_optimizer_is_never_faster_with_more_on_the_slow_tier(first: float, second: float) -> None:
    less, more = sorted((first, second))
    assert optimizer([1 - less, less]) <= optimizer([1 - more, more]) * (1 + 1e-12)


def test_training_flops_are_eight_a_parameter_and_token() -> None:
    assert sum(zero_offload.training_flops(1e9, 1000)) == 8e12
