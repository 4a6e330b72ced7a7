"""All measurements of one path: the CPUs of one node and the memory of one node."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cxl_offload.core import HUGE_PAGE_BYTES
from cxl_offload.profile.cpus import CpuOrder, thread_counts
from cxl_offload.profile.measure import probe
from cxl_offload.profile.measure.effort import Effort, WorkingSets
from cxl_offload.profile.measure.findings import Findings
from cxl_offload.profile.measure.probe import Allocator, Buffer, Quality
from cxl_offload.profile.model import (
    BandwidthCurve,
    BandwidthPoint,
    Latency,
    LoadedCurve,
    LoadedPoint,
    LoopKind,
    MixPoint,
    Pages,
    PathProfile,
)
from cxl_offload.profile.schedule import SETUP, Schedule
from cxl_offload.topology import Node


class PathProbe:
    """Puts the steps of one path on a schedule and collects what they find.

    The order is that of importance, for a schedule that runs out of time leaves out the last.
    Buffers are made by the first step that needs them and dropped by :meth:`close`.
    """

    def __init__(
        self,
        allocator: Allocator,
        initiator: Node,
        node: Node,
        *,
        order: CpuOrder,
        sizes: WorkingSets,
        effort: Effort,
        transparent_huge_pages: str,
    ) -> None:
        self.initiator = initiator
        self.node = node
        self._allocator = allocator
        self._order = order
        self._sizes = sizes
        self._effort = effort
        self._thp = transparent_huge_pages
        self._notes = list(sizes.notes)
        self._traffic: dict[Pages, Buffer] = {}
        self._linked: dict[Pages, Buffer] = {}
        self._latencies: list[Latency] = []
        self._points: dict[tuple[LoopKind, Pages], list[BandwidthPoint]] = {}
        self._mixes: list[MixPoint] = []
        self._loaded: list[LoadedPoint] = []
        self._quality = Quality()
        self._planned: set[Pages] = set()  # whose traffic buffer an earlier step makes

    def plan(self, schedule: Schedule) -> None:
        """Adds every step of this path."""
        parts = self._effort.parts
        if "latency" in parts:
            self._plan_latency(schedule, "base")
        if "bandwidth" in parts:
            self._plan_curves(schedule)
        if "loaded" in parts:
            self._plan_loaded(schedule)
        if "mixes" in parts:
            for reads, writes in probe.mixes():
                self._plan_mix(schedule, reads, writes)
        if "pages" in parts:
            for pages in self._huge_pages():
                self._plan_pages(schedule, pages)

    @property
    def longest_s(self) -> float:
        """What one step takes at most."""
        return self._effort.longest_s

    def collect(self, skipped: Sequence[str], into: Findings) -> None:
        """Adds this path."""
        into.paths.append(self.result(skipped))

    def result(self, skipped: Sequence[str]) -> PathProfile:
        """What was found; ``skipped`` are the labels that there was no time for."""
        notes = list(self._notes)
        if skipped:
            notes.append(f"not measured, the time was over: {'; '.join(skipped)}")
        if "nt_store" in self._effort.kinds and "nt_store" not in probe.kinds():
            notes.append("this architecture's build has no non-temporal stores")
        if quality := self._quality.note():
            notes.append(quality)
        curves = (
            BandwidthCurve(kind=kind, pages=pages, points=tuple(points))
            for (kind, pages), points in self._points.items()
        )
        threads = self._order.cores - 1
        loaded = LoadedCurve(pages="base", threads=threads, points=tuple(self._loaded))
        return PathProfile(
            initiator=self.initiator.id,
            node=self.node.id,
            cpus=self._order.cpus,
            working_set_bytes=self._sizes.traffic_bytes,
            latencies=tuple(self._latencies),
            curves=tuple(curves),
            loaded=(loaded,) if self._loaded else (),
            mixes=tuple(self._mixes),
            notes=tuple(notes),
        )

    def close(self) -> None:
        """Drops the buffers."""
        self._traffic.clear()
        self._linked.clear()

    def _label(self, what: str) -> str:
        return f"CPUs of node {self.initiator.id} on memory of node {self.node.id}: {what}"

    def _buffer(self, pages: Pages) -> Buffer:
        if pages not in self._traffic:
            self._drop_all_but(pages)
            self._traffic[pages] = probe.prepare(
                self._allocator,
                self._sizes.traffic_bytes,
                {self.node.id: 1},
                pages=pages,
                cpus=self._order.cpus,
            )
        return self._traffic[pages]

    def _chain(self, pages: Pages) -> Buffer:
        if pages not in self._linked:
            self._drop_all_but(pages)
            self._linked[pages] = probe.prepare_chase(
                self._allocator,
                self._sizes.chase_bytes,
                self.node.id,
                pages=pages,
                cpus=self._order.cpus,
            )
        return self._linked[pages]

    def _drop_all_but(self, pages: Pages) -> None:
        """One kind of pages is measured after the other: no need to hold memory for both."""
        for buffers in (self._traffic, self._linked):
            for other in [kind for kind in buffers if kind != pages]:
                del buffers[other]
        self._allocator.trim()

    def _plan_latency(self, schedule: Schedule, pages: Pages) -> None:
        def run(seconds: float) -> None:
            chain = self._chain(pages)
            found = probe.idle_latency(chain, self._order.cpus[0], seconds=seconds)
            self._latencies.append(
                Latency(pages=pages, working_set_bytes=chain.nbytes, latency_ns=found)
            )

        schedule.add(self._label(f"idle latency, {pages} pages"), run, setup=SETUP)

    def _plan_curves(self, schedule: Schedule) -> None:
        counts = thread_counts(self._order, few=self._effort.few_threads)
        for kind in self._kinds():
            few = self._effort.few_threads and kind != "load"
            for threads in counts[-1:] if few else counts:
                self._plan_bandwidth(schedule, kind, "base", threads)

    def _kinds(self) -> tuple[LoopKind, ...]:
        return tuple(kind for kind in self._effort.kinds if kind in probe.kinds())

    def _plan_bandwidth(
        self, schedule: Schedule, kind: LoopKind, pages: Pages, threads: int
    ) -> None:
        def run(seconds: float) -> None:
            point = probe.kind_bandwidth(
                self._buffer(pages),
                kind,
                self._order.cpus[:threads],
                seconds=seconds,
                repeats=self._effort.repeats,
                quality=self._quality,
            )
            self._points.setdefault((kind, pages), []).append(point)

        first = kind == "load" and pages not in self._planned
        self._planned.add(pages)
        label = self._label(f"{kind}, {threads} threads, {pages} pages")
        schedule.add(label, run, setup=SETUP if first else 0.0)

    def _plan_loaded(self, schedule: Schedule) -> None:
        cpus = self._order.cpus[: self._order.cores]
        if len(cpus) < 2:
            self._notes.append("loaded latency needs two cores; this process has one")
            return

        def step(delay_ns: int) -> Callable[[float], None]:
            def run(seconds: float) -> None:
                self._loaded.append(
                    probe.loaded_latency(
                        self._chain("base"),
                        self._buffer("base"),
                        cpus,
                        delay_ns=delay_ns,
                        seconds=seconds,
                    )
                )

            return run

        for delay_ns in self._effort.delays_ns:
            schedule.add(self._label(f"loaded latency, delay {delay_ns} ns"), step(delay_ns))

    def _plan_mix(self, schedule: Schedule, reads: int, writes: int) -> None:
        def run(seconds: float) -> None:
            rate = probe.mix_bandwidth(
                self._buffer("base"),
                reads,
                writes,
                self._order.cpus,
                seconds=seconds,
                repeats=self._effort.repeats,
                quality=self._quality,
            )
            self._mixes.append(
                MixPoint(
                    reads=reads,
                    writes=writes,
                    threads=len(self._order.cpus),
                    bandwidth_bytes_per_s=rate,
                )
            )

        schedule.add(self._label(f"reads:writes {reads}:{writes}"), run)

    def _huge_pages(self) -> tuple[Pages, ...]:
        """Kinds of huge pages to measure with; notes say why others are not."""
        found: list[Pages] = []
        if self._thp == "never":
            self._notes.append("transparent huge pages are off on this machine")
        else:
            found.append("thp")
        needed = self._sizes.traffic_bytes + self._sizes.chase_bytes
        for pool in self.node.huge_pages:
            if pool.page_bytes == HUGE_PAGE_BYTES and pool.free_bytes >= needed:
                found.append("2MiB")
        return tuple(found)

    def _plan_pages(self, schedule: Schedule, pages: Pages) -> None:
        """What other pages change."""
        self._plan_latency(schedule, pages)
        for kind in ("load",) if self._effort.few_threads else self._kinds():
            self._plan_bandwidth(schedule, kind, pages, len(self._order.cpus))
