"""Collects the results of the jobs of one measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cxl_offload.profile.model import CopyProfile, GpuFacts, InterleaveSweep, PathProfile
from cxl_offload.profile.schedule import Schedule


@dataclass(slots=True)
class Findings:
    """In the order of the jobs; ``notes`` are those that belong to no path."""

    paths: list[PathProfile] = field(default_factory=list)
    sweeps: list[InterleaveSweep] = field(default_factory=list)
    copies: list[CopyProfile] = field(default_factory=list)
    gpus: list[GpuFacts] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def not_measured(self, labels: Sequence[str]) -> None:
        """Notes the steps that there was no time for."""
        self.notes += [f"not measured, the time was over: {label}" for label in labels]


class Job(Protocol):
    """Measurements that share a schedule of their own."""

    @property
    def longest_s(self) -> float:
        """What one of its steps takes at most."""
        ...

    def plan(self, schedule: Schedule) -> None:
        """Adds every step."""
        ...

    def collect(self, skipped: Sequence[str], into: Findings) -> None:
        """Adds what was found; ``skipped`` are the labels of steps without time."""
        ...

    def close(self) -> None:
        """Drops the buffers."""
        ...
