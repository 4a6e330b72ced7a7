"""Products are timed with the clock that is given, for every size and number of rows."""

from __future__ import annotations

import itertools

import pytest

from cxl_offload.profile.operators import products


def test_products_are_timed_for_every_size_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "WIDTHS", (16, 32))
    ticks = itertools.count()
    found = products.measure_products(lambda: float(next(ticks)))
    assert [(point.weight_bytes, point.rows) for point in found] == [
        (nbytes, rows)
        for nbytes in (2 * 16 * 16, 2 * 16 * 44, 2 * 32 * 32, 2 * 32 * 88)
        for rows in products.ROWS
    ]
    assert {point.seconds.median for point in found} == {1.0}
