"""Layouts of the transformers planner."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace

from cxl_offload.plan.transformers.layout import Layout


def test_with_other_rows_nothing_else_is_lost() -> None:
    """It names every attribute, so one that is added later has to be named too."""
    layout = Layout(
        4,
        frozenset({"mlp"}),
        frozenset({"attention"}),
        frozenset({"embedding"}),
        kv="both",
        copied=frozenset({"head"}),
        states="host",
    )
    for field in fields(Layout):
        assert field.default is MISSING or getattr(layout, field.name) != field.default
    assert layout.with_rows(7) == replace(layout, rows=7)
