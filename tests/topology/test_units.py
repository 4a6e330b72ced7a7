"""Text with a unit, to and from plain numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxl_offload.units import (
    format_bandwidth,
    format_bytes,
    format_number,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_latency_ns,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [("64 GiB", 64 << 30), ("64GB", 64 * 10**9), ("1.5 KiB", 1536), ("0 B", 0), ("2 TiB", 2 << 40)],
)
def test_parse_bytes_reads_binary_and_decimal_units(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["64", "", "GiB", "-1 GiB", "64 GiB/s", "64 gib", "1 B 2", "nan B", "inf B", "1.3 B"]
)
def test_parse_bytes_refuses_text_without_a_unit_and_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"quantity|whole number"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["38.4 GB", "38.4", "38.4 ns", "38.4 /s", "-1 GB/s", "1e999 GB/s"])
def test_parse_bandwidth_refuses_what_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match="quantity"):
        parse_bandwidth(text)


def test_parse_bandwidth_and_latency_read_their_units() -> None:
    assert parse_bandwidth("38.4 GB/s") == 38.4e9
    assert parse_bandwidth("2 GiB/s") == 2 * 2**30
    assert parse_latency_ns("1.5 us") == 1500
    with pytest.raises(ValueError, match="139 GB"):
        parse_latency_ns("139 GB")


@given(st.integers(0, 1 << 50))
def test_format_bytes_is_within_its_digits_and_can_be_read_back(count: int) -> None:
    text = format_bytes(count)
    number, unit = text.split()
    size = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}[unit]
    assert float(number.replace(",", "")) * size == pytest.approx(count, rel=0.006)


@given(st.floats(1e-9, 900))
def test_format_seconds_can_be_read_back(seconds: float) -> None:
    number, unit = format_seconds(seconds).split()
    scale = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
    assert float(number) * scale == pytest.approx(seconds, rel=0.006)


def test_format_bandwidth_is_in_the_unit_of_data_sheets() -> None:
    assert format_bandwidth(38.4e9) == "38.4 GB/s"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(42870.6, "42,870"), (50.638, "50.64"), (0.00125, "0.00125"), (1.5e-7, "0.00000015"),
     (0.0, "0"), (-1234.5, "-1,234"), (2e9, "2,000,000,000"), (float("inf"), "inf")],
)  # fmt: skip
def test_format_number_has_four_digits_and_no_exponent(value: float, shown: str) -> None:
    assert format_number(value) == shown


def test_large_rates_and_times_are_written_without_exponents() -> None:
    assert format_bandwidth(3350e9) == "3,350 GB/s"
    assert format_seconds(12345.0) == "12,300 s"
    assert format_seconds(0.0) == "0 s"
    assert format_seconds(1.49e-19) == "0 s"
    assert format_seconds(0.9997e-3) == "1 ms"
    assert format_seconds(0.9994e-3) == "999 us"
    assert format_bytes(1 << 60) == "1,050,000 TiB"
