"""The processes of one training run, and the part of the machine that each may use.

torch is loaded by the first name that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxl_offload.lazy import lazy_names

if TYPE_CHECKING:
    from cxl_offload.ranks.share import RankShare, share_machine

__all__ = ["RankShare", "share_machine"]

__getattr__, __dir__ = lazy_names(__name__, {"share": __all__})
