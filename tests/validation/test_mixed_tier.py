from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxl_offload.validation import mixed_tier, predict
from cxl_offload.validation.mixed_tier import Loop, MixedTiers, TierRates

ON = TierRates((60e9, 40e9), (96, 212))
OFF = TierRates((48e9, 44e9), (96, 212))
TIERS = MixedTiers(ON, OFF, cache_bytes=1e8)
LOOP = Loop(
    cores=48,
    lines_per_core=9.0,
    access="read",
    pattern="sequential",
    prefetch=True,
    working_set_bytes=3e10,
    stride_bytes=8,
)


def test_saturated_stream_follows_the_table_of_its_prefetchers() -> None:
    assert mixed_tier.loop_bytes_per_s(TIERS, LOOP, (1, 0)) == 60e9
    off = replace(LOOP, prefetch=False)
    assert mixed_tier.loop_bytes_per_s(TIERS, off, (1, 0)) == 48e9
    assert mixed_tier.speedup(TIERS, LOOP, (6, 4)) == pytest.approx(100 / 60)


@pytest.mark.parametrize(
    ("pattern", "stride", "helped"),
    [
        ("sequential", 8, True),
        ("strided", 4095, True),
        ("strided", 4096, False),
        ("indexed", 8, False),
        ("scatter", 8, False),
    ],
)
def test_prefetchers_follow_streams_and_short_strides_only(
    pattern: mixed_tier.Pattern, stride: int, helped: bool
) -> None:
    loop = replace(LOOP, pattern=pattern, stride_bytes=stride)
    assert mixed_tier.prefetchable(loop) is helped
    assert not mixed_tier.prefetchable(replace(loop, prefetch=False))


def test_few_lines_in_flight_make_dram_alone_the_best_mix() -> None:
    few = replace(LOOP, cores=4)
    assert mixed_tier.best_mix(TIERS, few, grid_total=10) == (10, 0)
    assert mixed_tier.gain_over_cxl(TIERS, few, (10, 0)) == 0
    assert mixed_tier.speedup(TIERS, few, (9, 1)) == pytest.approx(96 / (0.9 * 96 + 0.1 * 212))


def test_stores_move_twice_the_bytes_and_saturate_with_half_the_lines() -> None:
    stores = replace(LOOP, access="write")
    assert mixed_tier.loop_bytes_per_s(TIERS, stores, (1, 0)) == 30e9
    few = replace(LOOP, cores=4, access="write")
    reads = replace(few, access="read")
    assert mixed_tier.loop_bytes_per_s(TIERS, few, (1, 0)) == pytest.approx(
        mixed_tier.loop_bytes_per_s(TIERS, reads, (1, 0))
    )


@given(st.integers(1, 20), st.floats(1, 60), st.floats(1, 15))
def test_best_mix_is_no_worse_than_any_other_of_its_grid(
    total: int, cores: float, lines: float
) -> None:
    loop = replace(LOOP, cores=cores, lines_per_core=lines)
    best = mixed_tier.best_mix(TIERS, loop, grid_total=total)
    highest = max(
        mixed_tier.loop_bytes_per_s(TIERS, loop, (total - cxl, cxl)) for cxl in range(total + 1)
    )
    reached = mixed_tier.loop_bytes_per_s(TIERS, loop, best)
    assert sum(best) == total
    assert reached == pytest.approx(highest, rel=1e-8)


def test_tie_keeps_pages_in_dram() -> None:
    slow_cxl = MixedTiers(TierRates((40e9, 10e9), (100, 200)), OFF)
    # 4:1 is the optimum of the equation; on a grid of 2, 1:1 gives half and 2:0 the whole of DRAM
    assert mixed_tier.best_mix(slow_cxl, LOOP, grid_total=2) == (2, 0)
    equal = MixedTiers(TierRates((40e9, 40e9), (100, 100)), OFF)
    assert mixed_tier.best_mix(equal, LOOP, grid_total=3) == (2, 1)
    assert mixed_tier.best_mix(equal, LOOP, grid_total=1) == (1, 0)


def test_second_hardware_thread_doubles_below_saturation_and_adds_nothing_above() -> None:
    assert mixed_tier.smt_gain(TIERS, replace(LOOP, cores=1), grid_total=10) == pytest.approx(1)
    assert mixed_tier.smt_gain(TIERS, LOOP, grid_total=10) == 0


def test_set_that_fits_in_cache_gains_nothing_from_memory() -> None:
    cached = replace(LOOP, working_set_bytes=9e7)
    assert mixed_tier.speedup(TIERS, cached, (5, 5)) == 1
    assert mixed_tier.best_mix(TIERS, cached, grid_total=10) == (10, 0)
    assert mixed_tier.gain_over_cxl(TIERS, cached, (5, 5)) == 0
    assert mixed_tier.smt_gain(TIERS, cached, grid_total=10) == 0


def test_random_access_hits_in_proportion_to_the_cache_and_a_stream_never() -> None:
    random = replace(LOOP, pattern="indexed", working_set_bytes=4e8)
    assert mixed_tier.miss_fraction(random, 1e8) == pytest.approx(0.75)
    assert mixed_tier.miss_fraction(replace(random, pattern="sequential"), 1e8) == 1


@given(
    st.lists(st.integers(1, 500).map(float), min_size=2, max_size=2),
    st.lists(st.integers(50, 500).map(float), min_size=2, max_size=2),
    st.floats(0, 1),
    st.floats(1, 1e4),
)
def test_interleaved_bandwidth_never_exceeds_tiers_or_littles_law(
    bandwidth: list[float], latency: list[float], on_second: float, lines: float
) -> None:
    shares = (1 - on_second, on_second)
    reached = mixed_tier.interleaved_bandwidth(
        [b * 1e9 for b in bandwidth], shares, latency_ns=latency, lines_in_flight=lines
    )
    for rate, share in zip(bandwidth, shares, strict=True):
        assert reached * share <= rate * 1e9 * (1 + 1e-9)
    mean_ns = latency[0] * shares[0] + latency[1] * shares[1]
    assert reached / 64 * mean_ns * 1e-9 <= lines * (1 + 1e-9)  # lines in flight of that rate


def test_concurrency_bound_of_one_line_is_one_line_a_latency() -> None:
    bound = mixed_tier.concurrency_bound([100.0], [1.0], lines_in_flight=1)
    assert bound == pytest.approx(64 / 100e-9)


def test_interleaved_bandwidth_with_half_of_the_concurrency_inputs_raises() -> None:
    with pytest.raises(ValueError, match="belong together"):
        mixed_tier.interleaved_bandwidth([1.0], [1.0], latency_ns=[100.0])


def test_latency_factor_with_slower_second_tier_falls_with_its_share() -> None:
    def factor(on_second: float) -> float:
        weights = [1 - on_second, on_second]
        answer = predict("latency_factor", {"latency_ns": [111, 229], "weights": weights})
        assert isinstance(answer.value, float)
        return answer.value

    factors = [factor(share) for share in (0, 0.1, 0.5, 1)]
    assert factors[0] == 1
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] == pytest.approx(111 / 229)
