from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxl_offload.validation import footprint
from cxl_offload.validation.footprint import ElementBytes, Lengths, LlmShape

GIB = 2**30
OPT = LlmShape(params=30e9, layers=48, width=7168, heads=56, kv_heads=56)
HALF = ElementBytes(2, 2, 2)


def test_kv_of_a_sequence_counts_every_number_of_k_and_v() -> None:
    shape = LlmShape(params=1, layers=3, width=8, heads=4, kv_heads=2)
    head_width = 8 // 4
    numbers = sum(2 * 2 * head_width for _ in range(3))  # K and V, 2 heads, each layer
    assert footprint.kv_bytes_per_token(shape, ElementBytes(2, 2, 2)) == 2 * numbers
    assert footprint.kv_bytes_per_sequence(shape, HALF, Lengths(5, 2)) == 7 * 2 * numbers


@given(st.floats(0, 1), st.integers(0, 100))
def test_host_and_gpu_parts_add_up_to_the_total(share: float, batch: int) -> None:
    lengths = Lengths(100, 28)
    host = footprint.host_bytes(OPT, HALF, lengths, batch=batch, kv_gpu_fraction=share)
    on_gpu = share * batch * footprint.kv_bytes_per_sequence(OPT, HALF, lengths)
    total = footprint.total_bytes(OPT, HALF, lengths, batch=batch)
    assert host + on_gpu == pytest.approx(total)


def need(batch: int, sizes: ElementBytes, lengths: Lengths, gpu_kv: Fraction) -> Fraction:
    kv = Fraction(2 * OPT.layers * OPT.width * lengths.total) * Fraction(sizes.kv) * batch
    hidden = Fraction(lengths.total * OPT.width) * Fraction(sizes.activations) * batch
    return Fraction(OPT.params) * Fraction(sizes.weights) + hidden + max(Fraction(0), kv - gpu_kv)


@given(
    st.fractions(40, 600),
    st.fractions(0, 60),
    st.sampled_from([0.5, 1, 2]),
    st.integers(1, 2048),
)
def test_max_batch_fits_and_one_more_does_not(
    capacity_gib: Fraction, gpu_kv_gib: Fraction, kv_bytes: float, tokens: int
) -> None:
    sizes, lengths = ElementBytes(2, kv_bytes, 2), Lengths(tokens, 3)
    gpu_kv, capacity = gpu_kv_gib * GIB, capacity_gib * GIB
    batch = footprint.max_batch(
        OPT, sizes, lengths, host_capacity_bytes=capacity, gpu_kv_bytes=gpu_kv
    )
    if batch > 0:
        assert need(batch, sizes, lengths, gpu_kv) <= capacity
    assert need(batch + 1, sizes, lengths, gpu_kv) > capacity


def test_max_batch_at_an_exact_tie_fits() -> None:
    lengths = Lengths(64, 64)
    exactly = need(7, HALF, lengths, Fraction(0))
    found = footprint.max_batch(
        OPT, HALF, lengths, host_capacity_bytes=exactly, gpu_kv_bytes=Fraction(0)
    )
    assert found == 7


def test_max_batch_is_zero_when_the_weights_do_not_fit() -> None:
    none = footprint.max_batch(
        OPT, HALF, Lengths(8, 8), host_capacity_bytes=Fraction(1), gpu_kv_bytes=Fraction(10**15)
    )
    assert none == 0


def test_max_batch_of_sequences_without_bytes_raises() -> None:
    with pytest.raises(ValueError, match="no bytes"):
        footprint.max_batch(
            OPT, HALF, Lengths(0, 0), host_capacity_bytes=Fraction(10**15), gpu_kv_bytes=Fraction(0)
        )


@pytest.mark.parametrize("changes", [(0, 1, 1, 1, 1), (1, 1, 1, 4, 8)])
def test_impossible_shapes_raise(changes: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="kv_heads <= heads"):
        LlmShape(*changes)
