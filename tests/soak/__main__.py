"""``python -m tests.soak --minutes 10 [--seed N] [--only KIND] [--json FILE]``; status 1 on the
first failure, 128 + N where signal N ended it early. ``--table FILE ...`` shows earlier results."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from . import ending, serving
from .left import MIB, PROCESS, Around, Growth, Held
from .memory import THREADS
from .rounds import ROUNDS, round_of


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


class Soak:
    """Rounds of every kind in turn, what they counted, and what they left."""

    def __init__(self, kinds: list[str], seed: int, round_s: float) -> None:
        self.kinds, self.seed, self.round_s = kinds, seed, round_s
        self.totals: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
        self.growth = Growth()
        self.last = Held.now()
        self.resident: list[float] = []
        self.began = time.monotonic()
        self.turn = 0
        self.failed = ""

    def run(self, minutes: float) -> None:
        until = self.began + minutes * 60
        while ending.goes_on(until) or self.turn == 0:
            at = self.turn % len(self.kinds)
            if at == 0 and "vllm" in self.kinds:
                serving.serving().begin(self.seed + self.turn + self.kinds.index("vllm"))
            self.one_round(self.kinds[at], until)
            self.turn += 1
            if self.turn % len(self.kinds) == 0:
                self.cycle()

    def one_round(self, kind: str, until: float) -> None:
        seed, left = self.seed + self.turn, until - time.monotonic()
        try:
            around, before = Around.now(), Held.now()
            counts = round_of(kind)(seed, min(self.round_s, max(left, 1.0)))
            held: tuple[Held, Held] | None = before, Held.now()
            if kind == "vllm":
                held = serving.serving().held
            else:
                around.check()
        except BaseException:
            self.failed = f"round {self.turn} ({kind}): repeat with --seed {seed} --only {kind}"
            say(f"FAILED in {self.failed}")
            raise
        if held is not None:
            self.growth.add(kind, *held)
        self.totals[kind].update(counts)
        self.totals[kind]["rounds"] += 1

    def cycle(self) -> None:
        before, self.last = self.last, Held.now()
        self.growth.add(PROCESS, before, self.last)
        self.resident.append(self.last.resident_bytes / MIB)
        say(
            f"{self.minutes():6.1f} min  round {self.turn:4d}  "
            f"resident {self.resident[-1]:6.0f} MiB"
        )

    def minutes(self) -> float:
        return (time.monotonic() - self.began) / 60

    def result(self) -> dict[str, Any]:
        ends = {"first": self.resident[0], "last": self.resident[-1]} if self.resident else {}
        return {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": commit(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "threads": THREADS,
            "seed": self.seed,
            "failed": self.failed,
            "minutes": round(self.minutes(), 2),
            "resident_mib": {name: round(value, 1) for name, value in ends.items()},
            "too much growth": self.growth.too_much(),
            "growth": {kind: self.growth.trends(kind) for kind in (*self.kinds, PROCESS)},
            "counts": {kind: dict(sorted(counts.items())) for kind, counts in self.totals.items()},
        }


def table(result: dict[str, Any]) -> str:
    """What was counted, kind by kind, and what the rounds added."""
    kinds = list(result["counts"])
    growth = {kind: result["growth"].get(kind, {}) for kind in (*kinds, PROCESS)}
    names = sorted({name for counts in result["counts"].values() for name in counts})
    lines = ["| counted | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    for name in names:
        cells = [f"{result['counts'][kind].get(name, 0):,}" for kind in kinds]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    measures = sorted({name for found in growth.values() for name in found})
    for name in measures:
        cells = [f"{growth[kind][name]:,}" if growth[kind] else "" for kind in kinds]
        lines.append(f"| added {name} | " + " | ".join(cells) + " |")
    if growth[PROCESS]:
        added = ", ".join(f"{found:,} {name}" for name, found in sorted(growth[PROCESS].items()))
        lines.append(f"\nAdded by all rounds of {PROCESS} together: {added}.")
    return "\n".join(lines)


def together(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts and growth of soaks of different kinds, as of one."""
    return {
        what: {kind: found for result in results for kind, found in result[what].items()}
        for what in ("counts", "growth")
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--round-seconds", type=float, default=10.0)
    parser.add_argument("--only", choices=list(ROUNDS), action="append", help="may be repeated")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--table", type=Path, nargs="+", help="show one table of earlier --json FILEs"
    )
    return parser.parse_args()


def kinds_of(only: list[str] | None) -> list[str]:
    """The kinds that were asked for; vLLM's only where it is installed."""
    kinds = [kind for kind in ROUNDS if not only or kind in only]
    if "vllm" in kinds:
        try:
            serving.interpreter()
        except serving.NotInstalledError as error:
            say(f"vllm is left out: {error}")
            kinds.remove("vllm")
    if not kinds:
        raise SystemExit("no kind of round is left")
    return kinds


def main() -> int:
    options = parse()
    if options.table:
        say(table(together([json.loads(path.read_text()) for path in options.table])))
        return 0
    kinds = kinds_of(options.only)
    say(f"seed {options.seed}, {THREADS} threads, {options.minutes:g} minutes: {', '.join(kinds)}")
    ending.end_in_order()
    if "vllm" in kinds:
        serving.serving()
    soak = Soak(kinds, options.seed, options.round_seconds)
    try:
        soak.run(options.minutes)
        serving.close()
    finally:
        result = soak.result()
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n")
        say(table(result))
    ended = f" (ended by signal {ending.received[0]})" if ending.received else ""
    for line in result["too much growth"]:
        say(f"FAILED: {line}")
    if result["too much growth"]:
        return 1
    say(f"no failure in {result['minutes']} minutes{ended}")
    return 128 + ending.received[0] if ending.received else 0


if __name__ == "__main__":
    sys.exit(main())
