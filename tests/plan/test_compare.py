"""Tiers that bring little are left alone: each against the best plan without it."""

from __future__ import annotations

import pytest

from cxl_offload.plan.compare import best_without_idle_tiers
from cxl_offload.plan.hardware import Hardware

from .toy_executor import Speed, Toy, has


def faster_by(cxl: float, drive: float) -> Speed:
    """100 tokens/s, and so many more with CXL memory and with the drive."""
    return lambda hw: 100.0 * (1 + cxl * has(hw, "cxl")) * (1 + drive * has(hw, "nvme"))


@pytest.mark.parametrize(("gain", "used"), [(0.5, True), (0.031, True), (0.029, False), (0, False)])
def test_cxl_memory_is_used_where_it_brings_the_margin(gain: float, used: bool) -> None:
    best, cxl, copies = best_without_idle_tiers(Toy(faster_by(gain, 0.5)))
    assert (cxl.used, has(best.hardware, "cxl")) == (used, used)
    assert cxl.gain == pytest.approx(gain)
    assert best.tokens_per_s == pytest.approx(150.0 * (1 + gain * used))
    assert copies is None
    assert ("below the margin of 3.0%" in cxl.reason) is (0 < gain < 0.03)
    assert ("CXL memory adds nothing" in cxl.reason) is (gain == 0)


@pytest.mark.parametrize(("margin", "used"), [(0.0, True), (0.02, True), (0.06, False)])
def test_margin_is_the_requests(margin: float, used: bool) -> None:
    _, cxl, _ = best_without_idle_tiers(Toy(faster_by(0.05, 0.5), cxl_margin=margin))
    assert cxl.used is used


def test_drive_is_asked_before_cxl_memory() -> None:
    """Alone the drive brings nothing; only beside an idle CXL tier would it seem to."""
    toy = Toy(faster_by(0.5, 0.01))
    best, cxl, _ = best_without_idle_tiers(toy)
    assert not has(best.hardware, "nvme")
    assert has(best.hardware, "cxl")
    assert "the drive adds 1.0%, below the margin" in cxl.reason
    asked = [(has(hw, "nvme"), has(hw, "cxl")) for hw in toy.seen]
    assert asked == [(True, True), (False, True), (False, False)]


def test_tier_without_which_nothing_fits_is_used_without_a_gain() -> None:
    def speed(hardware: Hardware) -> float | None:
        return 7.0 if has(hardware, "cxl") else None

    best, cxl, _ = best_without_idle_tiers(Toy(speed))
    assert (cxl.used, cxl.gain, best.tokens_per_s) == (True, None, 7.0)
    assert "without CXL memory not one batch fits" in cxl.reason


def test_request_that_fits_nowhere_says_what_the_executor_says() -> None:
    with pytest.raises(MemoryError, match="toy on epyc9354-cxl-a: nothing fits"):
        best_without_idle_tiers(Toy(lambda _: None))


def test_machine_without_cxl_memory_says_so() -> None:
    class WithoutCxl(Toy):
        def hardware(self) -> Hardware:
            return super().hardware().without("cxl")

    _, cxl, _ = best_without_idle_tiers(WithoutCxl(faster_by(0.5, 0.5)))
    assert (cxl.used, cxl.gain) == (False, None)
    assert cxl.reason.startswith("there is no CXL tier to use")
