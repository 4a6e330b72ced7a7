"""Measured latency and bandwidth of every node, from every node's CPUs.

``quick`` and ``measure_machine`` measure, and load the C++ core; profiles are read without it.
:mod:`cxl_offload.profile.model` says what there is to know, :mod:`cxl_offload.profile.plot` draws
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxl_offload.lazy import lazy_names

if TYPE_CHECKING:
    from cxl_offload.profile.copies import measure_copies as measure_copies
    from cxl_offload.profile.measure import FULL as FULL
    from cxl_offload.profile.measure import QUICK as QUICK
    from cxl_offload.profile.measure import RATES as RATES
    from cxl_offload.profile.measure import Measurement as Measurement
    from cxl_offload.profile.measure import measure_machine as measure_machine
    from cxl_offload.profile.measure import quick as quick
    from cxl_offload.profile.model import BandwidthCurve as BandwidthCurve
    from cxl_offload.profile.model import BandwidthPoint as BandwidthPoint
    from cxl_offload.profile.model import CopyProfile as CopyProfile
    from cxl_offload.profile.model import Estimate as Estimate
    from cxl_offload.profile.model import Fingerprint as Fingerprint
    from cxl_offload.profile.model import InterleavePoint as InterleavePoint
    from cxl_offload.profile.model import InterleaveSweep as InterleaveSweep
    from cxl_offload.profile.model import Latency as Latency
    from cxl_offload.profile.model import LoadedCurve as LoadedCurve
    from cxl_offload.profile.model import LoadedPoint as LoadedPoint
    from cxl_offload.profile.model import MixPoint as MixPoint
    from cxl_offload.profile.model import NodeFacts as NodeFacts
    from cxl_offload.profile.model import NodeRates as NodeRates
    from cxl_offload.profile.model import PathProfile as PathProfile
    from cxl_offload.profile.model import Profile as Profile
    from cxl_offload.profile.model import saturation_threads as saturation_threads
    from cxl_offload.profile.store import load_profile as load_profile
    from cxl_offload.profile.store import save_profile as save_profile

__getattr__, __dir__ = lazy_names(__name__)
