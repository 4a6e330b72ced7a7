"""``python -m tests.soak --minutes 10 [--seed N] [--json FILE]``; status 1 on the first failure."""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .rounds import ROUNDS, THREADS


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def soak(minutes: float, seed: int, round_s: float) -> dict[str, Any]:
    """Rounds of every kind in turn until the time is over."""
    begin = time.monotonic()
    totals: dict[str, Counter[str]] = {kind: Counter() for kind in ROUNDS}
    resident: list[float] = []
    turn = 0
    while (left := begin + minutes * 60 - time.monotonic()) > 0 or turn == 0:
        kind = list(ROUNDS)[turn % len(ROUNDS)]
        try:
            counts = ROUNDS[kind](seed + turn, min(round_s, max(left, 1.0)))
        except BaseException:
            say(f"FAILED in round {turn} ({kind}): repeat with --seed {seed + turn} --only {kind}")
            raise
        totals[kind].update(counts)
        totals[kind]["rounds"] += 1
        turn += 1
        if turn % len(ROUNDS) == 0:
            resident.append(resident_mib())
            say(
                f"{(time.monotonic() - begin) / 60:6.1f} min  round {turn:4d}  "
                f"resident {resident[-1]:6.0f} MiB"
            )
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "threads": THREADS,
        "seed": seed,
        "minutes": round((time.monotonic() - begin) / 60, 2),
        "resident_mib": {"first": resident[0], "last": resident[-1]} if resident else {},
        "counts": {kind: dict(sorted(counts.items())) for kind, counts in totals.items()},
    }


def table(result: dict[str, Any]) -> str:
    kinds = list(result["counts"])
    names = sorted({name for counts in result["counts"].values() for name in counts})
    lines = ["| counted | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    for name in names:
        cells = [f"{result['counts'][kind].get(name, 0):,}" for kind in kinds]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--round-seconds", type=float, default=10.0)
    parser.add_argument("--only", choices=list(ROUNDS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.only:
        for kind in [kind for kind in ROUNDS if kind != options.only]:
            del ROUNDS[kind]
    say(f"seed {options.seed}, {THREADS} threads, {options.minutes:g} minutes")
    result = soak(options.minutes, options.seed, options.round_seconds)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    say(table(result))
    say(f"no failure in {result['minutes']} minutes")


if __name__ == "__main__":
    main()
