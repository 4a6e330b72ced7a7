"""Requests counted in a tiny Mixtral, replayed on the pages of a simulated machine."""

from __future__ import annotations

import pytest

from benchmarks.tune_experts import (
    ASKED,
    LAYERS,
    measured_requests,
    peers,
    run_most_used,
    zipf_mixtral,
)
from cxl_offload.topology import load_machine

NEAR, FAR = 0, 2


@pytest.mark.parametrize("exponent", [0.6, 1.2])
def test_most_used_experts_come_within_a_tenth_of_the_oracle(exponent: float) -> None:
    asked = measured_requests(zipf_mixtral(exponent, seed=1), 1024, seed=2)
    assert (asked.sum(axis=1) == LAYERS * ASKED).all()
    machine = load_machine("epyc9354-cxl-a")
    near, far = (
        machine.access(machine.initiator, node).read_bandwidth_bytes_per_s  # type: ignore[union-attr]
        for node in (NEAR, FAR)
    )
    assert near is not None
    assert far is not None
    ours, others = run_most_used(asked), peers(asked, seed=3)
    took = ours.seconds(near, far)
    assert took <= 1.1 * others["oracle"].seconds(near, far)
    assert 0 < ours.moved_of_all <= 0.01
    assert took < 0.6 * others["first experts near"].seconds(near, far)
