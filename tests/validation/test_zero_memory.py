"""What ZeRO-Offload needs of a host, and a slowdown by its parts."""

from __future__ import annotations

import pytest

from cxl_offload.validation import zero_memory


def test_largest_params_fit_and_more_do_not() -> None:
    most = zero_memory.largest_params(196 * 2**30)
    assert zero_memory.fits(int(most), 196)
    assert not zero_memory.fits(int(most) + 1, 196)
    assert zero_memory.fits(2**26, 1)  # exactly 1 GiB


def test_slowdown_weighs_each_part_by_its_share() -> None:
    # a step of 10 s: optimizer 3 s -> 3.3 s, transfers 1 s -> 1.5 s
    slowdown = zero_memory.step_slowdown(
        optimizer_share=0.3, optimizer_slowdown=0.1, transfer_share=0.1, transfer_slowdown=0.5
    )
    assert slowdown == pytest.approx((3.3 + 1.5 + 6) / 10 - 1)
