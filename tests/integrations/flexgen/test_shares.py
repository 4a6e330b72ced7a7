"""Whole tensors and whole sequences: our rule against FlexGen's own code and published numbers."""

from __future__ import annotations

import re
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from flexgen.flex_opt import get_choice
from flexgen.pytorch_backend import TorchMixedDevice
from hypothesis import given
from hypothesis import strategies as st

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.flexgen.places import Split, SplitPart
from cxl_offload.integrations.flexgen.shares import (
    home_shares,
    kv_sequences,
    realised_kv,
    realised_weights,
)
from cxl_offload.plan.flexgen.layout import opt_groups, weight_homes

H = 9216  # OPT-66B
LAYER = opt_groups(layers=64, hidden=H, vocab=50272, positions=2048)[1:3]


@pytest.mark.parametrize(("requested", "realised"), [(20, 8.3), (30, 41.7), (50, 50.0), (80, 91.7)])
def test_realised_weights_of_opt_66b_layers_are_those_flexgen_gives(
    requested: int, realised: float
) -> None:
    rows = realised_weights(LAYER, home_shares(requested, 100 - requested, None))

    assert rows[-1].home == "accelerator"
    assert rows[-1].requested_percent == requested
    assert rows[-1].realised_percent == pytest.approx(realised, abs=0.05)
    assert sum(row.realised_percent for row in rows) == pytest.approx(100)


def test_weights_that_would_silently_be_nothing_are_refused_with_what_works() -> None:
    with pytest.raises(ConfigError, match=r"10 % on accelerator would be 0\.\d+ %") as refused:
        realised_weights(LAYER, home_shares(10, 90, None))

    least = int(re.search(r"least that works is (\d+) %", str(refused.value))[1])  # type: ignore[index]
    assert realised_weights(LAYER, home_shares(least, 100 - least, None))[-1].realised_percent > 5
    with pytest.raises(ConfigError):
        realised_weights(LAYER, home_shares(least - 1, 101 - least, None))


@given(
    sizes=st.lists(st.integers(1, 10**6), min_size=1, max_size=12),
    accelerator=st.integers(0, 100),
    host=st.integers(0, 100),
)
def test_weight_homes_are_flexgens_for_three_homes(
    sizes: list[int], accelerator: int, host: int
) -> None:
    host = min(host, 100 - accelerator)
    percents = [100 - accelerator - host, host, accelerator]
    ends = list(accumulate(sizes))

    ours = weight_homes(sizes, home_shares(accelerator, host, None).cuts)

    middles = [(end - size / 2) / ends[-1] * 100 for size, end in zip(sizes, ends, strict=True)]
    assert ours == [get_choice(middle, percents, (0, 1, 2)) for middle in middles]


class _Lengths(TorchMixedDevice):  # type: ignore[misc]
    """FlexGen's mixed device, only told how long its segments would be."""

    def __init__(self) -> None:
        super().__init__([None, None, None])
        self.seen: list[int] = []

    def allocate(self, shape: Any, dtype: Any, seg_lengths: Any, **_: Any) -> None:
        self.seen = [int(length) for length in seg_lengths]


@given(rows=st.integers(1, 64), accelerator=st.integers(0, 99), host=st.integers(0, 99))
def test_sequences_are_flexgens_without_a_split(rows: int, accelerator: int, host: int) -> None:
    host = min(host, 100 - accelerator)
    disk = 100 - accelerator - host
    heads = 4
    mixed = _Lengths()
    mixed.init_cache_one_gpu_batch(
        SimpleNamespace(n_head=heads, input_dim=64),
        SimpleNamespace(prompt_len=3, gen_len=2),
        SimpleNamespace(
            gpu_batch_size=rows,
            cache_gpu_percent=accelerator,
            cache_cpu_percent=host,
            cache_disk_percent=disk,
        ),
    )

    on_disk, on_host, on_accelerator = kv_sequences(rows, home_shares(accelerator, host, None))

    assert [on_accelerator * heads, on_host * heads, on_disk * heads] == mixed.seen


@given(
    rows=st.integers(1, 64),
    accelerator=st.integers(0, 100),
    cuts=st.lists(st.integers(1, 99), min_size=1, max_size=3, unique=True),
)
def test_split_sequences_sum_to_the_batch_and_are_within_one_of_exact(
    rows: int, accelerator: int, cuts: list[int]
) -> None:
    edges = [0, *sorted(cuts), 100]
    parts = [float(b - a) for a, b in pairwise(edges)]
    split = Split(tuple(SplitPart(str(at), part) for at, part in enumerate(parts)))

    sequences = kv_sequences(rows, home_shares(accelerator, 100 - accelerator, split))

    assert sum(sequences) == rows
    on_host = sum(sequences[1:-1])
    for count, part in zip(sequences[1:-1], parts, strict=True):
        assert abs(count - on_host * part / 100) < 1


@pytest.mark.parametrize(("rows", "percent"), [(3, 27), (8, 4)])
def test_kv_that_would_silently_be_nothing_is_refused_with_what_works(
    rows: int, percent: int
) -> None:
    with pytest.raises(ConfigError, match=f"{percent} % on accelerator") as refused:
        realised_kv(rows, home_shares(percent, 100 - percent, None))

    least = int(re.search(r"least that works is (\d+) %", str(refused.value))[1])  # type: ignore[index]
    batch = int(re.search(r"--gpu-batch-size (\d+)", str(refused.value))[1])  # type: ignore[index]
    for size, share in ((rows, least), (batch, percent)):
        shown = realised_kv(size, home_shares(share, 100 - share, None))
        assert next(r for r in shown if r.home == "accelerator").realised_percent > 0
    for size, share in ((rows, least - 1), (batch - 1, percent)):
        with pytest.raises(ConfigError):
            realised_kv(size, home_shares(share, 100 - share, None))
