"""Sizes and shares of the C++ core that others have to know; bound here, typed nowhere again."""

from __future__ import annotations

from cxl_offload import _C

LINE_BYTES = _C.LINE_BYTES
"""One cache line, the unit in which cores ask memory (x86-64, Grace)."""

BASE_PAGE_BYTES = _C.BASE_PAGE_BYTES
"""The smallest page of the machines that are planned for; the running kernel says its own."""

HUGE_PAGE_BYTES = _C.HUGE_PAGE_BYTES
"""Of ``pages="thp"`` and ``"2MiB"``, and of a granule where none is asked for."""

GIGANTIC_PAGE_BYTES = _C.GIGANTIC_PAGE_BYTES
"""Of ``pages="1GiB"``."""

MOST_BYTES = _C.MOST_BYTES
"""Of one allocation; more than any address space has."""

STATE_BLOCK = _C.STATE_BLOCK
"""Elements of an optimizer state in 8 bits that share a scale, which has a byte (docs/adam.md)."""

POOL_SLACK_SHARE = _C.POOL_SLACK_SHARE
"""Of the peak of live blocks: what pools may have mapped beyond them."""


ForkGuard = _C.ForkGuard
"""Knows whether this process is a forked child of the one that made it."""


def features() -> dict[str, str]:
    """What of the core runs on this machine, by name, for people."""
    found = {
        "instruction sets": ", ".join(_C.supported_isas()),
        "products of bfloat16": _bf16_products(),
        "4-bit codes as integers": "yes" if _C.has_integer_codes() else "no",
    }
    try:
        found["GPU driver"] = _C.open_cuda_driver().name
    except (OSError, ValueError) as error:
        found["GPU driver"] = str(error)
    return found


def _bf16_products() -> str:
    names = _C.bf16_products()
    slow = "avx512bf16" in names and not _C.has_fast_bf16_products()
    return (", ".join(names) or "no") + ("; avx512bf16 is slower than float32" if slow else "")


def reserve_bytes(total_bytes: int) -> int:
    """What sessions never take of a node of ``total_bytes``."""
    return _C.reserve_bytes(total_bytes)
