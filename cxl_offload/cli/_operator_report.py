"""The table of an operator profile."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from cxl_offload.cli._report_table import show, table
from cxl_offload.profile.operators.model import OperatorProfile
from cxl_offload.units import MIB, format_bandwidth


def print_operators(console: Console, found: OperatorProfile, how: str) -> None:
    """Every operator by size; bandwidth is of weights, or of keys and values."""
    numbers = ("size", "microseconds", "bandwidth")
    title = f"Operators of torch on {found.device}, half precision, {found.threads} threads ({how})"
    made = table(title, "operator", *numbers, right=numbers)
    for point in found.linears:
        row = "row" if point.rows == 1 else "rows"
        _add(made, f"linear, {point.rows} {row}", point.weight_bytes, point.seconds.median)
    for entry in found.caches:
        _add(made, entry.operator, entry.cache_bytes, entry.seconds.median)
    for kept in found.cache_types:
        heads = f", {kept.group} heads share keys" if kept.group > 1 else ""
        name = f"attention over {kept.kv_dtype or 'bfloat16'}{heads}"
        _add(made, name, kept.cache_bytes, kept.seconds.median)
    if found.adam is not None:
        _add(made, "step of Adam", found.adam.traffic_bytes, found.adam.seconds.median)
    show(console, made)
    columns = ("µs a call of torch", "ns an instruction of Python")
    between = table(
        "Between the products of a decoder layer, in their sequence",
        *("rows", "width"),
        *columns,
        right=("rows", "width", *columns),
    )
    for layer in found.layers:
        call, python = layer.call_s.median * 1e6, layer.python_instruction_s.median * 1e9
        between.add_row(str(layer.rows), str(layer.hidden), f"{call:.2f}", f"{python:.1f}")
    show(console, between)


def _add(made: Table, name: str, nbytes: int, seconds: float) -> None:
    made.add_row(
        name, f"{nbytes / MIB:.2f} MiB", f"{seconds * 1e6:.1f}", format_bandwidth(nbytes / seconds)
    )
