from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxl_offload.plan.equations import copies
from cxl_offload.plan.equations.copies import CopyPath

PATH = CopyPath(50e9, {"ldram": 100e9, "cxl": 20e9}, {"ldram": 10e-6, "cxl": 10.5e-6})


@given(st.floats(0, 1), st.integers(1, 2**34))
def test_copy_never_beats_the_link_or_a_tier_and_one_of_them_binds(
    on_cxl: float, nbytes: int
) -> None:
    shares = {"ldram": 1 - on_cxl, "cxl": on_cxl}
    moving = copies.copy_seconds(PATH, shares, nbytes) - copies.copy_seconds(PATH, shares, 0)
    busy = [nbytes / 50e9, nbytes * shares["ldram"] / 100e9, nbytes * on_cxl / 20e9]
    assert moving == pytest.approx(max(busy), rel=1e-6, abs=1e-15)


def test_set_up_of_a_copy_is_the_mean_over_its_pages() -> None:
    seconds = [copies.copy_seconds(PATH, {"ldram": 1 - f, "cxl": f}, 0) for f in (0, 0.5, 1)]
    assert seconds == pytest.approx([10e-6, 10.25e-6, 10.5e-6])


def test_tier_without_a_rate_raises() -> None:
    with pytest.raises(KeyError):
        copies.copy_seconds(PATH, {"hbm": 1.0}, 64)
