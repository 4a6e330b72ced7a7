"""Decode times from operators: sums that can be done by hand, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxl_offload.plan.flexgen import decode_time as equations
from cxl_offload.plan.flexgen.decode_time import DecodeShape, KvHome, decode_time
from cxl_offload.profile.curves import Estimate
from cxl_offload.profile.operators.model import (
    CacheOperator,
    CachePoint,
    LayerPoint,
    LinearPoint,
    OperatorProfile,
)

KIB, MIB = 1 << 10, 1 << 20
WEIGHT_BYTES_PER_S = 10e9
CACHE_BYTES_PER_S: dict[CacheOperator, float] = {
    "copied attention": 2e9,
    "attention in place": 8e9,
    "load": 5e9,
}
ROWS = (1, 8, 32)
HOMES: tuple[KvHome, ...] = ("accelerator", "host, in place", "host, loaded")


def exactly(value: float) -> Estimate:
    return Estimate(value, value, value, 1)


LAYERS = tuple(
    LayerPoint(rows, hidden, exactly(1e-6 * (1 + rows * hidden / 8192)), exactly(1e-9 * (9 + rows)))
    for hidden in (512, 2048)
    for rows in ROWS
)
"""A call takes 1 us and as much more for every 8192 elements; Python takes longer with the rows."""


def operators(**changes: object) -> OperatorProfile:
    """Of a machine whose linear layers take as long as their bytes, times their rows."""
    linears = tuple(
        LinearPoint(rows, size, exactly(rows * size / WEIGHT_BYTES_PER_S))
        for size in (MIB, 16 * MIB)
        for rows in ROWS
    )
    caches = tuple(
        CachePoint(operator, size, exactly(size / rate))
        for operator, rate in CACHE_BYTES_PER_S.items()
        for size in (MIB, 16 * MIB)
    )
    made = OperatorProfile(
        device="cpu",
        threads=2,
        linears=linears,
        caches=caches,
        layers=LAYERS,
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def shape(**changes: object) -> DecodeShape:
    made = DecodeShape(layers=10, hidden=1024, ffn=4096, vocabulary=1024, rows=8, attended=256.0)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_linear_layers_cost_their_bytes_times_their_rows() -> None:
    terms = decode_time(shape(), operators()).terms
    matrices = 10 * 2 * (4 * 1024 * 1024 + 2 * 1024 * 4096)
    assert terms["linear layers"] == pytest.approx(8 * matrices / WEIGHT_BYTES_PER_S)
    assert terms["output layer"] == pytest.approx(8 * 2 * 1024 * 1024 / WEIGHT_BYTES_PER_S)


@pytest.mark.parametrize("kv", HOMES)
def test_attention_costs_what_its_home_asks_for(kv: KvHome) -> None:
    cache = 10 * 2 * 2 * 8 * 256 * 1024
    expected = {
        "accelerator": cache / 2e9,
        "host, in place": cache / 8e9,
        "host, loaded": cache / 2e9 + cache / 5e9,
    }
    assert decode_time(shape(kv=kv), operators()).terms["attention"] == pytest.approx(expected[kv])


def test_weights_on_the_host_are_loaded_once_for_all_batches() -> None:
    one = decode_time(shape(host_weights=0.5), operators())
    two = decode_time(shape(host_weights=0.5, batches=2), operators())
    matrices = 10 * 2 * (4 * 1024 * 1024 + 2 * 1024 * 4096)
    assert one.terms["weights loaded"] == pytest.approx(matrices / 2 / 5e9)
    assert two.terms["weights loaded"] == one.terms["weights loaded"]
    assert two.terms["linear layers"] == pytest.approx(2 * one.terms["linear layers"])
    assert (one.sequences, two.sequences) == (8, 16)
    assert two.tokens_per_s > one.tokens_per_s


@given(
    rows=st.integers(1, 200),
    nbytes=st.floats(KIB, 1 << 33),
    noise=st.lists(st.floats(0.5, 2.0), min_size=6, max_size=6),
)
def test_seconds_between_the_measured_points_are_positive_and_never_jump(
    rows: int, nbytes: float, noise: list[float]
) -> None:
    given_points = operators().linears
    linears = tuple(
        dataclasses.replace(point, seconds=exactly(point.seconds.median * by))
        for point, by in zip(given_points, noise, strict=True)
    )
    made = operators(linears=linears)
    here, beside = made.linear_s(rows, nbytes), made.linear_s(rows, nbytes * 1.0001)
    assert here == pytest.approx(beside, rel=0.01, abs=1e-6)
    if rows <= ROWS[-1]:
        assert here > 0


def test_measured_points_are_met_exactly() -> None:
    made = operators()
    for rows, size in itertools.product(ROWS, (MIB, 16 * MIB)):
        assert made.linear_s(rows, size) == pytest.approx(rows * size / WEIGHT_BYTES_PER_S)


def test_what_is_between_products_counts_calls_instructions_and_one_layer_more() -> None:
    for kv in HOMES:
        of_torch, of_python = equations.CALLS[kv]
        layer = of_torch * 2e-6 + of_python * 17e-9  # 8 rows of 1024
        found = decode_time(shape(kv=kv, batches=3), operators()).terms["between products"]
        assert found == pytest.approx((10 + 1) * 3 * layer)


@pytest.mark.parametrize(
    ("rows", "hidden", "elements"),
    [(8, 512, 8 * 512), (20, 1280, 20 * 1280), (64, 4096, 64 * 4096), (1, 64, 512)],
)
def test_calls_grow_with_their_elements_but_not_below_the_narrowest(
    rows: int, hidden: int, elements: int
) -> None:
    assert operators().call_s(rows, hidden) == pytest.approx(1e-6 * (1 + elements / 8192))


def test_python_takes_as_long_beyond_the_measured_rows_as_at_the_last() -> None:
    made = operators()
    assert made.python_instruction_s(20, 999) == pytest.approx(29e-9)
    assert made.python_instruction_s(500, 9999) == made.python_instruction_s(32, 2048)


def test_impossible_shapes_and_missing_operators_are_refused() -> None:
    for wrong in ({"rows": 0}, {"host_weights": 1.5}, {"attended": 0.0}):
        with pytest.raises(ValueError, match="must be above 0"):
            decode_time(shape(**wrong), operators())
    without = tuple(point for point in operators().caches if point.operator != "load")
    with pytest.raises(ValueError, match="load was not measured"):
        decode_time(shape(kv="host, loaded"), operators(caches=without))
    with pytest.raises(ValueError, match="no linear layer"):
        operators(linears=())
    with pytest.raises(ValueError, match="no layer"):
        operators(layers=())
