"""Packed blocks against an oracle in double precision, written from the description alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cxl_offload.transfer import PackedFormat, pack, unpack

Array = NDArray[Any]

FP8 = np.array(
    [
        (-1 if code & 128 else 1)
        * (
            (code & 7) * 2.0**-9
            if code >> 3 & 15 == 0
            else (8 + (code & 7)) * 2.0 ** ((code >> 3 & 15) - 10)
        )
        if code & 127 != 127
        else np.nan
        for code in range(256)
    ]
)


def as_numbers(raw: Array, element: str) -> Array:
    """Doubles of what the bytes hold."""
    if element == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.view(element).astype(np.float64)


def as_bytes(values: Array, element: str) -> Array:
    if element == "bfloat16":
        bits = values.astype(np.float32).view(np.uint32)
        return (bits >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(element).view(np.uint8)


def packed(layout: PackedFormat, raw: Array, elements: int) -> Array:
    target = np.full(layout.packed_bytes(elements), 0xEE, np.uint8)
    pack(layout, source=raw.ctypes.data, elements=elements, target=target.ctypes.data)
    return target


def unpacked(layout: PackedFormat, coded: Array, elements: int) -> Array:
    size = 4 if layout.element == "float32" else 2
    target = np.full(elements * size + 8, 0xEE, np.uint8)
    unpack(layout, source=coded.ctypes.data, elements=elements, target=target.ctypes.data)
    assert (target[elements * size :] == 0xEE).all()
    return as_numbers(target[: elements * size], layout.element)


def groups_of(values: Array, group: int) -> list[Array]:
    return [values[at : at + group] for at in range(0, len(values), group)]


def half(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float16(value))


def int4_oracle(values: Array, group: int) -> tuple[Array, Array]:
    """The values that should come back, and how far off rounding may put them."""
    back, slack = [], []
    for each in groups_of(values, group):
        low = half(each.min()) if np.isfinite(each).all() else np.nan
        step = half((each.max() - low) / 15)
        if not (np.isfinite(low) and np.isfinite(step)):
            back.append(np.full(len(each), np.nan))
            slack.append(np.zeros(len(each)))
            continue
        codes = np.clip(np.rint((each - low) / step), 0, 15) if step else np.zeros(len(each))
        back.append(low + codes * step)
        # In single precision a tie may fall to either side.
        off = (each - low) / step if step else np.zeros(len(each))
        near_tie = np.abs(np.abs(off - np.floor(off)) - 0.5) < 1e-4
        slack.append(np.where(near_tie, step, 0) + np.abs(back[-1]) * 2.0**-8)
    return np.concatenate(back), np.concatenate(slack)


def numbers(count: int, element: str, seed: int) -> Array:
    random = np.random.default_rng(seed)
    values = random.normal(size=count) * 2.0 ** random.integers(-6, 6, size=count)
    return as_bytes(values, element)


ELEMENTS = ["float16", "bfloat16", "float32"]


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("count", [1, 31, 64, 257, 5000])
def test_int4_gives_what_the_oracle_gives(element: Any, group: int, count: int) -> None:
    layout = PackedFormat("int4", element, group)
    raw = numbers(count, element, count)
    expected, slack = int4_oracle(as_numbers(raw, element), group)
    back = unpacked(layout, packed(layout, raw, count), count)
    assert (np.abs(back - expected) <= slack + 1e-7).all()


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("count", [1, 31, 64, 257, 5000])
def test_fp8_takes_the_nearest_of_all_codes(element: Any, count: int) -> None:
    layout = PackedFormat("fp8", element, 64)
    raw = numbers(count, element, count + 1)
    values = as_numbers(raw, element)
    coded = packed(layout, raw, count)
    scales = coded[layout.core().code_bytes(count) :].view(np.float32)
    for at, each in enumerate(groups_of(values, 64)):
        scale = float(scales[at])
        assert scale == pytest.approx(np.abs(each).max() / 448, rel=1e-6)
        codes = coded[at * 64 : at * 64 + len(each)]
        chosen = np.abs(FP8[codes] - each / scale)
        nearest = np.nanmin(np.abs(FP8[None, :] - (each / scale)[:, None]), axis=1)
        assert (chosen <= nearest + 1e-4 * np.abs(each / scale)).all()
    back = unpacked(layout, coded, count)
    expected = FP8[coded[:count]] * np.repeat(scales, 64)[:count].astype(np.float64)
    assert np.allclose(back, expected, rtol=2.0**-8, atol=1e-7)


def test_error_stays_within_half_a_step() -> None:
    raw = numbers(4096, "float16", 3)
    values = as_numbers(raw, "float16")
    layout = PackedFormat("int4")
    back = unpacked(layout, packed(layout, raw, 4096), 4096)
    for was, now in zip(groups_of(values, 64), groups_of(back, 64), strict=True):
        assert np.abs(was - now).max() <= 0.51 * (was.max() - was.min()) / 15 + 1e-6
    layout = PackedFormat("fp8")
    back = unpacked(layout, packed(layout, raw, 4096), 4096)
    for was, now in zip(groups_of(values, 64), groups_of(back, 64), strict=True):
        least = np.abs(was).max() / 448 * 2.0**-9
        assert (np.abs(was - now) <= np.abs(was) * 2.0**-4 + least).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -70000.0, 2e6])
def test_int4_group_with_what_codes_cannot_hold_is_all_nan(bad: float) -> None:
    values = np.ones(192, np.float32)
    values[70] = bad
    layout = PackedFormat("int4", "float32", 64)
    back = unpacked(layout, packed(layout, values.view(np.uint8), 192), 192)
    assert np.isnan(back[64:128]).all()
    assert (back[:64] == 1).all()
    assert (back[128:] == 1).all()


def test_fp8_keeps_nan_where_it_is_and_makes_infinity_nan() -> None:
    values = np.linspace(-3, 3, 128, dtype=np.float32)
    values[[5, 6, 70]] = [np.nan, np.inf, -np.inf]
    layout = PackedFormat("fp8", "float32", 64)
    back = unpacked(layout, packed(layout, values.view(np.uint8), 128), 128)
    assert set(np.flatnonzero(np.isnan(back))) == {5, 6, 70}


@pytest.mark.parametrize("code", ["int4", "fp8"])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -(2.0**-20)])
def test_group_of_one_value_comes_back(code: Any, value: float) -> None:
    layout = PackedFormat(code, "float32", 32)
    raw = np.full(40, value, np.float32).view(np.uint8)
    back = unpacked(layout, packed(layout, raw, 40), 40)
    assert np.allclose(back, value, rtol=1e-6, atol=2.0**-24)


def test_sizes_are_those_of_the_format() -> None:
    assert PackedFormat("int4").packed_bytes(64) == 32 + 4
    assert PackedFormat("int4").packed_bytes(65) == 2 * (32 + 4)
    assert PackedFormat("fp8", group_elements=256).packed_bytes(512) == 2 * (256 + 4)
    assert PackedFormat("fp8").packed_bytes(0) == 0


def test_first_of_two_numbers_is_in_the_upper_half() -> None:
    values = np.zeros(32, np.float32)
    values[:3] = [15, 1, 2]
    layout = PackedFormat("int4", "float32", 32)
    coded = packed(layout, values.view(np.uint8), 32)
    assert list(coded[:2]) == [0xF1, 0x20]
    assert list(coded[16:].view(np.float16)) == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(("int5",), "int5"), (("int4", "float64"), "float64"), (("fp8", "float16", 48), "48")],
)
def test_unknown_format_is_refused_by_name(arguments: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        PackedFormat(*arguments)


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(width=16, allow_nan=True, allow_infinity=True), max_size=200),
    code=st.sampled_from(["int4", "fp8"]),
)
def test_any_numbers_come_back_near_or_nan(values: list[float], code: Any) -> None:
    layout = PackedFormat(code, "float16", 32)
    raw = np.array(values, np.float16)
    back = unpacked(layout, packed(layout, raw.view(np.uint8), len(values)), len(values))
    for was, now in zip(groups_of(raw.astype(np.float64), 32), groups_of(back, 32), strict=True):
        finite = np.isfinite(was)
        if code == "int4" and not finite.all():
            assert np.isnan(now).all()
            continue
        if not finite.any():
            continue
        reach = was[finite].max() - was[finite].min() if code == "int4" else 0
        bound = reach / 15 * 0.51 + np.abs(was[finite]) * 2.0**-4 + np.abs(was[finite]).max() / 448
        assert (np.abs(was[finite] - now[finite]) <= bound + 1e-6).all()
        assert np.isnan(now[~finite]).all()
