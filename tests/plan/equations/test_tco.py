from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cxl_offload.plan.equations import tco

EXAMPLE = tco.TcoInputs(0.1, 0.125, 2, 1.1, "printed", n_congest=8, n_threads=12)


def test_printed_form_of_the_worked_example_is_bit_for_bit_the_formula() -> None:
    k = min(8, 12)
    ratio = (0.1 - 1) / (0.1 + 2 * 0.125 / k - 1 - 1 / 2)
    assert tco.server_ratio(EXAMPLE) == ratio
    assert tco.saving(EXAMPLE) == 1 - 1.1 * ratio
    assert round(ratio, 4) == 0.6575
    assert round(tco.saving(EXAMPLE), 4) == 0.2767


@pytest.mark.parametrize(
    ("changes", "servers", "saved"),
    [
        ({"n_congest": 1, "n_threads": 1}, 78.26, 13.91),
        ({"form": "corrected", "congestion": "multiply"}, 68.90, 24.21),
    ],
)
def test_variants_of_the_worked_example_match_their_published_arithmetic(
    changes: dict[str, object], servers: float, saved: float
) -> None:
    variant = replace(EXAMPLE, **changes)  # type: ignore[arg-type]
    assert 100 * tco.server_ratio(variant) == pytest.approx(servers, abs=0.005)
    assert 100 * tco.saving(variant) == pytest.approx(saved, abs=0.005)


inputs_strategy = st.builds(
    tco.TcoInputs,
    rl_d=st.floats(0.01, 0.5),
    rl_c=st.floats(0.01, 0.9),
    c=st.floats(0.25, 8),
    r_t=st.floats(0.5, 3),
    form=st.sampled_from(["printed", "corrected"]),
    n_congest=st.integers(1, 64),
    n_threads=st.integers(1, 64),
    congestion=st.sampled_from(["none", "multiply"]),
)


@given(inputs_strategy, st.floats(0.1, 100), st.floats(1, 1000), st.floats(0, 1e6))
def test_both_fleets_take_equal_time_at_the_ratio(
    inputs: tco.TcoInputs, d: float, n_baseline: float, w: float
) -> None:
    try:
        baseline, cxl = tco.times(inputs, d=d, w=w, n_baseline=n_baseline)
    except ValueError:
        assume(False)
        raise
    assert cxl == pytest.approx(baseline, rel=1e-9, abs=1e-6 * d * n_baseline)


@given(inputs_strategy)
def test_saving_is_zero_at_the_break_even_cost(inputs: tco.TcoInputs) -> None:
    try:
        cost = tco.break_even_server_cost(inputs)
    except ValueError:
        assume(False)
        raise
    assert tco.saving(replace(inputs, r_t=cost)) == pytest.approx(0, abs=1e-12)


def test_corrected_congestion_lengthens_and_printed_one_shortens_cxl_time() -> None:
    def ratio(form: str, threads: int) -> float:
        return tco.server_ratio(
            replace(EXAMPLE, form=form, congestion="multiply", n_threads=threads)  # type: ignore[arg-type]
        )

    assert ratio("corrected", 32) > ratio("corrected", 8) == ratio("corrected", 2)
    assert ratio("printed", 8) < ratio("printed", 2)


def test_cost_of_servers_agrees_with_the_saving() -> None:
    cost = tco.cost_of_servers(EXAMPLE, n_baseline=100, server_cost=5000)
    assert 1 - cost.cxl_cost / cost.baseline_cost == pytest.approx(tco.saving(EXAMPLE))


@pytest.mark.parametrize(
    "changes",
    [{"c": 0}, {"rl_d": -1}, {"n_threads": None}, {"n_congest": 0}, {"r_t": 0}],
)
def test_inputs_that_the_form_cannot_use_raise(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="tco"):
        replace(EXAMPLE, **changes)  # type: ignore[arg-type]


def test_cxl_as_slow_as_ssd_has_no_ratio_of_servers() -> None:
    slow = tco.TcoInputs(0.1, 40.0, 2, 1.1, "corrected")
    with pytest.raises(ValueError, match="replaces no server"):
        tco.server_ratio(slow)


def test_warnings_name_a_working_set_that_fits_in_memory() -> None:
    found = tco.warnings(EXAMPLE, d=1, w=50, n_baseline=100)
    assert any("nothing is left on SSD" in line for line in found)
    assert not any(
        "SSD, the ratio" in line for line in tco.warnings(EXAMPLE, d=1, w=1e6, n_baseline=1)
    )
