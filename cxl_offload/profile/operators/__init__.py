"""What decoding is made of: the operators of torch, timed in the sequence of a decoder layer.

:mod:`cxl_offload.profile.operators.model` is the profile, frozen data without torch;
``measure_operators`` makes one, and loads torch when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxl_offload.lazy import lazy_names

if TYPE_CHECKING:
    from cxl_offload.profile.operators.measure import measure_operators as measure_operators
    from cxl_offload.profile.operators.model import OPERATORS_VERSION as OPERATORS_VERSION
    from cxl_offload.profile.operators.model import CacheOperator as CacheOperator
    from cxl_offload.profile.operators.model import CachePoint as CachePoint
    from cxl_offload.profile.operators.model import LayerPoint as LayerPoint
    from cxl_offload.profile.operators.model import LinearPoint as LinearPoint
    from cxl_offload.profile.operators.model import OperatorProfile as OperatorProfile
    from cxl_offload.profile.operators.model import ProductPoint as ProductPoint

__getattr__, __dir__ = lazy_names(__name__)
