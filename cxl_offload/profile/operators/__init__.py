"""What decoding is made of: the operators of torch, timed in the sequence of a decoder layer.

:mod:`cxl_offload.profile.operators.model` is the profile, frozen data without torch;
``measure_operators`` makes one, and loads torch when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxl_offload.lazy import lazy_names

if TYPE_CHECKING:
    from cxl_offload.profile.operators.measure import measure_operators
    from cxl_offload.profile.operators.model import (
        OPERATORS_VERSION,
        CacheOperator,
        CachePoint,
        LayerPoint,
        LinearPoint,
        OperatorProfile,
        ProductPoint,
    )

__all__ = [
    "OPERATORS_VERSION",
    "CacheOperator",
    "CachePoint",
    "LayerPoint",
    "LinearPoint",
    "OperatorProfile",
    "ProductPoint",
    "measure_operators",
]

__getattr__, __dir__ = lazy_names(__name__)
