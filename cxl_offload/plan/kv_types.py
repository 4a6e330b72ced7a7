"""What keys and values may be kept as beside the model's own type, and what attention reaches then.

Free of torch: the planner and the integration share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

CODES = "int4"
"""4-bit codes in groups, each with two float16 numbers; not a type of torch."""

GROUP = 64
"""Numbers with one scale, as FlexGen has them."""

CODE_BYTES = GROUP // 2
SCALE_BYTES = 4


def int4_row_bytes(dim: int) -> int:
    """Bytes of 4-bit codes and scales of ``dim`` numbers: whole groups."""
    return -(-dim // GROUP) * (CODE_BYTES + SCALE_BYTES)


@dataclass(frozen=True, slots=True)
class KvType:
    """A type of keys and values.

    Attributes
    ----------
    row_bytes
        Bytes of a position of a head of so many numbers.
    reached
        Share of the memory's bandwidth that attention reaches, over that in half precision: what
        is left is the conversion to float32. Measured, one run (docs/attention.md, Speed).
    """

    row_bytes: Callable[[int], int]
    reached: float


KV_TYPES = {
    "float8_e4m3fn": KvType(int, 0.55 / 0.79),
    "float8_e5m2": KvType(int, 0.67 / 0.79),
    CODES: KvType(int4_row_bytes, 0.54 / 0.79),
}
"""By the name that ``--kv-dtype`` takes. All of them lose precision."""


def kv_type_remedy(name: str) -> str:
    """What to say instead of ``name``, which is none of them."""
    if name in ("fp8", "float8"):
        return "there are two: float8_e4m3fn (more digits) or float8_e5m2 (more range); name one"
    return f"it is one of {', '.join(KV_TYPES)}"
