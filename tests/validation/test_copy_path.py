from __future__ import annotations

import pytest

from cxl_offload.plan.machine_rates import MachineRates
from cxl_offload.topology import load_machine
from cxl_offload.validation.copy_path import (
    CopyPath,
    copy_seconds,
    extra_setup_s,
    path_of_machine,
)

PATH = CopyPath(50e9, {"ldram": 100e9, "cxl": 20e9}, {"ldram": 10e-6, "cxl": 10.5e-6})


def test_set_up_of_a_copy_is_the_mean_over_its_pages() -> None:
    seconds = [copy_seconds(PATH, {"ldram": 1 - f, "cxl": f}, 0) for f in (0, 0.5, 1)]
    assert seconds == pytest.approx([10e-6, 10.25e-6, 10.5e-6])


def test_bytes_take_the_time_of_the_slowest_part_beside_the_set_up() -> None:
    assert copy_seconds(PATH, {"cxl": 1.0}, 2e10) == pytest.approx(1 + 10.5e-6)


def test_tier_without_a_rate_raises() -> None:
    with pytest.raises(KeyError):
        copy_seconds(PATH, {"hbm": 1.0}, 64)


def test_small_copies_carry_the_machine_files_setup_and_extra() -> None:
    numbers = MachineRates(load_machine("epyc9354-cxl-a"))
    path = path_of_machine(numbers, ["ldram", "cxl"])
    extra = path.tier_setup_s["cxl"] - path.tier_setup_s["ldram"]
    assert extra == pytest.approx(extra_setup_s(numbers, "cxl"))
    assert extra_setup_s(MachineRates(load_machine("spr3-h100")), "cxl") is None
