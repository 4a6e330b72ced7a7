"""What all benchmarks share: the machine they ran on, ratios of interleaved runs, JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

_RESAMPLES = 4000
INSTRUCTIONS = (
    *("avx2", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_int8", "asimd", "asimdhp", "bf16", "i8mm", "sve", "sve2"),
)


@dataclass(frozen=True)
class Ratio:
    """Median of the ratios of paired runs, and the 95 % interval of that median."""

    median: float
    low: float
    high: float


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Ratio of runs that took turns, ``ours[i]`` right beside ``theirs[i]``.

    The interval is the bootstrap's: medians of ratios drawn with replacement.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{len(ours)} and {len(theirs)} runs: pair them, at least one")
    ratios = np.asarray(ours, dtype=float) / np.asarray(theirs, dtype=float)
    random = np.random.default_rng(0)
    draws = random.integers(0, len(ratios), size=(_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[draws], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high))


def describe_machine() -> dict[str, Any]:
    """Date, commit, processor with its caches, cores, memory, and how loaded the machine was."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB",
        "caches": caches(),
        "instructions": instructions(),
        "load_average": os.getloadavg(),
    }


def commit() -> str:
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    folder = Path(__file__).parent
    done = subprocess.run(asked, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def caches(cpu: Path = Path("/sys/devices/system/cpu/cpu0")) -> str:
    """Of a CPU, as the kernel knows them; empty where it does not."""
    found = []
    for each in sorted((cpu / "cache").glob("index*")):
        level, kind, size = (
            (each / name).read_text().strip() for name in ("level", "type", "size")
        )
        if kind != "Instruction":
            found.append(f"L{level} {size}")
    return ", ".join(found)


def instructions() -> str:
    """Of those that kernels of this package and its peers use, what the CPU has."""
    words: set[str] = set()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith(("flags", "Features")):
            words |= set(line.partition(":")[2].split())
    return ", ".join(name for name in INSTRUCTIONS if name in words)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a result; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def check_plot(path: Path | None) -> None:
    """Ends the program at its start, and not after an hour, where a picture cannot be drawn."""
    if path is not None and find_spec("matplotlib") is None:
        raise SystemExit("--plot: needs matplotlib, which this environment does not have")
