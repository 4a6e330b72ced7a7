"""A watch that finds the CPUs wanted by other programs all the time."""

from __future__ import annotations

import time


class _Always:
    why_off = ""

    @property
    def sleeping_seconds(self) -> float:
        return time.perf_counter()


def always_shared() -> _Always:
    """In place of ``cxl_offload.ops.shared_cpus._watch``."""
    return _Always()
