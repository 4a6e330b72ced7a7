"""Spoilt and forged files, generated; ``python -m tests.kept MINUTES`` goes on for longer."""

from __future__ import annotations

import random

import pytest

from tests.kept.hostile import check_device, check_file


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(10))
def test_spoilt_file_is_dropped_or_gives_right_blocks(seed: int) -> None:
    numbers = random.Random(f"hostile {seed}")
    for _ in range(25):
        check_file(numbers.randbytes(8))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(10))
def test_spoilt_device_is_dropped_refused_or_gives_right_blocks(seed: int) -> None:
    numbers = random.Random(f"hostile device {seed}")
    for _ in range(25):
        check_device(numbers.randbytes(8))
