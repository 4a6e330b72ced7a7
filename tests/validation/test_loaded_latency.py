from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxl_offload.validation import loaded_latency


@given(st.floats(1, 5000), st.floats(1e9, 5e11), st.floats(50, 500))
def test_closed_loop_latency_keeps_littles_law_or_is_idle(
    lines: float, peak: float, idle: float
) -> None:
    latency = loaded_latency.closed_loop_latency_ns(
        idle_latency_ns=idle, peak_bytes_per_s=peak, lines=lines
    )
    throughput = lines * 64 / (latency * 1e-9)
    assert latency >= idle
    assert throughput <= peak * (1 + 1e-9)
    saturated = throughput == pytest.approx(peak)
    assert saturated or latency == idle


@given(st.floats(1e9, 5e11), st.floats(100, 5000))
def test_lines_in_flight_of_a_saturated_point_give_its_latency_back(
    peak: float, latency: float
) -> None:
    lines = loaded_latency.lines_in_flight(peak, latency)
    found = loaded_latency.closed_loop_latency_ns(
        idle_latency_ns=50, peak_bytes_per_s=peak, lines=lines
    )
    assert found == pytest.approx(latency)
