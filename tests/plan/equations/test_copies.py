from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxl_offload.plan.equations.copies import path_bytes_per_s


@given(st.floats(0, 1))
def test_copy_never_beats_the_link_or_a_tier_and_one_of_them_binds(on_cxl: float) -> None:
    seconds = 1 / path_bytes_per_s(50e9, [100e9, 20e9], [1 - on_cxl, on_cxl])
    busy = [1 / 50e9, (1 - on_cxl) / 100e9, on_cxl / 20e9]
    assert seconds == pytest.approx(max(busy), rel=1e-6)
