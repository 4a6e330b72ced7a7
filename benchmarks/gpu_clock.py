"""Timing on a GPU, and the machine it was timed on: what the GPU benchmarks share."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

Work = Callable[[torch.cuda.Stream], None]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and extremes of some seconds."""

    median_s: float
    least_s: float
    most_s: float

    @classmethod
    def of(cls, samples: list[float]) -> Spread:
        return cls(statistics.median(samples), min(samples), max(samples))

    def rate(self, nbytes: int) -> float:
        """Bytes per second at the median."""
        return nbytes / self.median_s


def device_seconds(work: Work, stream: torch.cuda.Stream, repeats: int) -> float:
    """Seconds of one run by the GPU's own clock, the mean of ``repeats`` runs in a row."""
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        begin.record(stream)
        for _ in range(repeats):
            work(stream)
        end.record(stream)
    stream.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def wall_seconds(work: Work, stream: torch.cuda.Stream, repeats: int) -> float:
    """Seconds of one run from its call until the stream is done, the mean of ``repeats`` runs."""
    stream.synchronize()
    with torch.cuda.stream(stream):
        begin = time.perf_counter()
        for _ in range(repeats):
            work(stream)
            stream.synchronize()
    return (time.perf_counter() - begin) / repeats


def interleaved(
    works: Mapping[str, Work],
    *,
    clock: Callable[[Work, torch.cuda.Stream, int], float] = device_seconds,
    rounds: int = 7,
    repeats: int = 4,
) -> dict[str, Spread]:
    """Times each work once a round, so that what disturbs one disturbs all."""
    stream = torch.cuda.Stream()
    for work in works.values():
        clock(work, stream, 1)
    samples: dict[str, list[float]] = {name: [] for name in works}
    for round_ in range(rounds):
        names = list(works) if round_ % 2 == 0 else list(works)[::-1]
        for name in names:
            samples[name].append(clock(works[name], stream, repeats))
    return {name: Spread.of(values) for name, values in samples.items()}


def describe_machine() -> dict[str, Any]:
    """GPU, driver, processor, versions, commit and date of a run."""
    query = "--query-gpu=driver_version,pcie.link.gen.current,pcie.link.width.current"
    answer = _output(["nvidia-smi", query, "--format=csv,noheader"]).partition("\n")[0]
    driver, generation, width = [*(part.strip() for part in answer.split(",")), "", "", ""][:3]
    processor = [
        line.partition(":")[2].strip()
        for line in _output(["lscpu"]).splitlines()
        if line.startswith("Model name")
    ]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _output(["git", "rev-parse", "--short", "HEAD"]).strip() or "unknown",
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "pcie": f"gen {generation} x{width}",
        "processor": processor[0] if processor else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""


def spread_row(spread: Spread) -> dict[str, float]:
    return asdict(spread)


def size_text(nbytes: int) -> str:
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"
