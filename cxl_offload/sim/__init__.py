"""Simulated time: recorded events replayed on a machine's nodes, links and engines.

Nothing here is measured, and nothing here knows the planner's equations.
"""

from __future__ import annotations

from cxl_offload.renamed import old_names
from cxl_offload.sim.cache import Cache, WorkingSet
from cxl_offload.sim.fabric import Fabric, SwitchLink
from cxl_offload.sim.loaded import loaded_latency_ns
from cxl_offload.sim.replay import replay
from cxl_offload.sim.resources import CpuStream, Engines
from cxl_offload.sim.timeline import Timeline
from cxl_offload.sim.trace import ENGINES, Engine, Event, Trace
from cxl_offload.sim.training import TrainingWork, training_trace
from cxl_offload.sim.workload import ModelShape, TensorHome

__all__ = [
    "ENGINES",
    "Cache",
    "CpuStream",
    "Engine",
    "Engines",
    "Event",
    "Fabric",
    "ModelShape",
    "SwitchLink",
    "TensorHome",
    "Timeline",
    "Trace",
    "TrainingWork",
    "WorkingSet",
    "loaded_latency_ns",
    "replay",
    "training_trace",
]


__getattr__ = old_names(__name__)
