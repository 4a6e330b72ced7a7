"""LLM tensor offloading over DRAM and CXL memory tiers.

``import cxl_offload`` loads neither torch nor the C++ core; the names below load what they need
when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cxl_offload.memory import (
        Bind,
        Dax,
        FirstTouch,
        Interleave,
        Memory,
        Placement,
        Preferred,
        Weighted,
        use,
    )
    from cxl_offload.ops.activations import offload_activations
    from cxl_offload.ops.offload import offload_optimizer
    from cxl_offload.tensor import (
        empty,
        empty_like,
        from_tensor,
        full,
        move,
        placement_of,
        record_stream,
        stats,
        zeros,
    )
    from cxl_offload.topology import discover, load_machine

__version__ = "0.1.0"

_HOMES = {
    "cxl_offload.memory": (
        "Bind",
        "Dax",
        "FirstTouch",
        "Interleave",
        "Memory",
        "Placement",
        "Preferred",
        "Weighted",
        "use",
    ),
    "cxl_offload.ops.activations": ("offload_activations",),
    "cxl_offload.ops.offload": ("offload_optimizer",),
    "cxl_offload.tensor": (
        "empty",
        "empty_like",
        "from_tensor",
        "full",
        "move",
        "placement_of",
        "record_stream",
        "stats",
        "zeros",
    ),
    "cxl_offload.topology": ("discover", "load_machine"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Bind",
    "Dax",
    "FirstTouch",
    "Interleave",
    "Memory",
    "Placement",
    "Preferred",
    "Weighted",
    "discover",
    "empty",
    "empty_like",
    "from_tensor",
    "full",
    "load_machine",
    "move",
    "offload_activations",
    "offload_optimizer",
    "placement_of",
    "record_stream",
    "stats",
    "use",
    "zeros",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"cxl_offload.{name} needs torch; install it, e.g. pip install 'cxl_offload[torch]'"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
