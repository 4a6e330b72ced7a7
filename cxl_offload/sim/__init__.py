"""Simulated time: recorded events replayed on a machine's nodes, links and engines.

Nothing here is measured, and nothing here knows the planner's equations.
"""

from __future__ import annotations

from cxl_offload.sim.replay import replay
from cxl_offload.sim.resources import Engines
from cxl_offload.sim.timeline import Timeline
from cxl_offload.sim.trace import ENGINES, Engine, Event, Trace

__all__ = ["ENGINES", "Engine", "Engines", "Event", "Timeline", "Trace", "replay"]
