"""Measured latency and bandwidth of every node, from every node's CPUs.

``quick`` and ``measure_machine`` measure; they load the C++ core when they are first used, so that
profiles can be read without it. :mod:`cxl_offload.profile.model` says what there is to know,
:mod:`cxl_offload.profile.plot` draws it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxl_offload.lazy import lazy_names
from cxl_offload.profile.copies import measure_copies
from cxl_offload.profile.model import (
    BandwidthCurve,
    BandwidthPoint,
    CopyProfile,
    Estimate,
    Fingerprint,
    InterleavePoint,
    InterleaveSweep,
    Latency,
    LoadedCurve,
    LoadedPoint,
    MixPoint,
    NodeFacts,
    NodeRates,
    PathProfile,
    Profile,
    saturation_threads,
)
from cxl_offload.profile.store import load_profile, save_profile

if TYPE_CHECKING:
    from cxl_offload.profile.measure import FULL, QUICK, RATES, Measurement, measure_machine, quick

__all__ = [
    "FULL",
    "QUICK",
    "RATES",
    "BandwidthCurve",
    "BandwidthPoint",
    "CopyProfile",
    "Estimate",
    "Fingerprint",
    "InterleavePoint",
    "InterleaveSweep",
    "Latency",
    "LoadedCurve",
    "LoadedPoint",
    "Measurement",
    "MixPoint",
    "NodeFacts",
    "NodeRates",
    "PathProfile",
    "Profile",
    "load_profile",
    "measure_copies",
    "measure_machine",
    "quick",
    "saturation_threads",
    "save_profile",
]

__getattr__, __dir__ = lazy_names(__name__)
