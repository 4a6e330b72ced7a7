"""The processes of one training run, and the part of the machine that each may use.

torch is loaded by the first name that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxl_offload.lazy import lazy_names

if TYPE_CHECKING:
    from cxl_offload.ranks.share import RankShare as RankShare
    from cxl_offload.ranks.share import share_machine as share_machine
    from cxl_offload.ranks.torchrun import is_rank_of_job as is_rank_of_job
    from cxl_offload.ranks.torchrun import joined_group as joined_group

__getattr__, __dir__ = lazy_names(__name__)
