"""A busy neighbour, and what it costs stock and this package.

``python -m benchmarks.neighbour`` is the process: it copies one big array over another with one
thread, while it is told to. It ends with its standard input, so also where the benchmark that
started it is killed. :class:`Neighbour` starts it, and lets it work for the length of a block.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from benchmarks.measurements import Ratio, paired_ratio

ARRAY_BYTES = 256 << 20
"""Of each of the two arrays; more than processors have of caches, as a rule."""
PIECE_BYTES = 4 << 20
"""Copied between two looks at what is asked: about a millisecond."""

QUIET, BESIDE = "quiet", "beside a neighbour"
WORK, REST = b"w", b"r"
_ENDS_S = 5.0
_SETTLES_S = 0.6
"""After the work: for longer than threads of `share_cpus()` sleep when nobody wants their CPUs."""

BAR_RATIO, BAR_FALLS = 0.98, 0.95


class Neighbour:
    """The process; it rests until a block of :meth:`during` is entered, and ends with ``with``.

    Attributes
    ----------
    seconds, cpu_seconds, bytes_copied
        Over all blocks so far: how long it worked, on how much of a CPU, and what it copied.
    """

    def __init__(self, array_bytes: int = ARRAY_BYTES) -> None:
        self.seconds = self.cpu_seconds = 0.0
        self.bytes_copied = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.neighbour", str(array_bytes)],
            cwd=Path(__file__).resolve().parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the benchmark, which then ends this process
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Neighbour:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process; does nothing the second time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    @contextlib.contextmanager
    def during(self, condition: str) -> Iterator[None]:
        """A block in which it works where the condition is ``BESIDE``, and rests otherwise.

        Raises
        ------
        RuntimeError
            The process ended by itself.
        """
        if condition == QUIET:
            yield
            return
        self._ask(WORK)
        yield  # an exception ends the whole process, not only its work
        done = self._ask(REST)
        time.sleep(_SETTLES_S)
        self.seconds += done["seconds"]
        self.cpu_seconds += done["cpu_seconds"]
        self.bytes_copied += done["bytes"]

    def _ask(self, what: bytes) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(what)
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the neighbour ended by itself, with {self._process.wait()}")
        return dict(json.loads(line))

    def describe(self) -> dict[str, Any]:
        """What it did, for the JSON of a benchmark."""
        seconds = max(self.seconds, 1e-9)
        return {
            "kind": "measured",
            "seconds": self.seconds,
            "cpu_share": self.cpu_seconds / seconds,
            "copied_bytes_per_s": self.bytes_copied / seconds,
        }


@dataclass(frozen=True, slots=True)
class Falls:
    """This package over stock, alone and beside a neighbour.

    Attributes
    ----------
    quiet, beside
        Speed of this package over stock's.
    falls
        How many times as long stock takes beside the neighbour as alone, over the same of this
        package: above 1, the neighbour costs stock more.
    """

    quiet: Ratio
    beside: Ratio
    falls: Ratio


def falls_of(stock: Mapping[str, Sequence[float]], ours: Mapping[str, Sequence[float]]) -> Falls:
    """Compares seconds by condition; those of a round stand at the same place of all lists."""
    by_round = [
        [beside / quiet for quiet, beside in zip(side[QUIET], side[BESIDE], strict=True)]
        for side in (stock, ours)
    ]
    return Falls(
        quiet=paired_ratio(stock[QUIET], ours[QUIET]),
        beside=paired_ratio(stock[BESIDE], ours[BESIDE]),
        falls=paired_ratio(*by_round),
    )


def falls_table(found: Mapping[str, Falls]) -> str:
    """A line for each case, with medians and 95 % intervals.

    What does not reach a bar with the lower end of its interval is marked.
    """
    width = max(len(case) for case in found) + 2
    head = (f"this over stock, {QUIET}", f"{BESIDE}", "stock's fall over this one's")
    lines = [" " * width + "".join(f"{each:>32}" for each in head)]
    for case, each in found.items():
        bars = ((each.quiet, BAR_RATIO), (each.beside, BAR_RATIO), (each.falls, BAR_FALLS))
        cells = [
            f"{'' if ratio.low >= bar else '! '}{ratio.median:.2f} "
            f"({ratio.low:.2f} to {ratio.high:.2f})"
            for ratio, bar in bars
        ]
        lines.append(f"{case:{width}}" + "".join(f"{cell:>32}" for cell in cells))
    told = f"{BAR_RATIO} of stock, {BAR_FALLS} of stock's own fall"
    lines.append(f"! its lower end is below the bar: {told}")
    return "\n".join(lines)


def falls_document(neighbour: Neighbour, found: Mapping[str, Falls]) -> dict[str, Any]:
    """Of all cases, for the JSON of a benchmark."""
    return {
        "did": neighbour.describe(),
        "cases": {case: asdict(each) for case, each in found.items()},
    }


def work(array_bytes: int) -> None:
    """Copies while it is told to, and answers each word with a line of JSON, until stdin ends."""
    source, target = (np.full(array_bytes, each, dtype=np.uint8) for each in (1, 2))
    busy, at, copied, began, cpu = False, 0, 0, 0.0, 0.0
    while True:
        if not busy or select.select([0], [], [], 0)[0]:
            asked = os.read(0, 1)
            if not asked:
                return
            now, now_cpu = time.perf_counter(), time.process_time()
            done = {"bytes": copied, "seconds": now - began, "cpu_seconds": now_cpu - cpu}
            busy, copied, began, cpu = asked == WORK, 0, now, now_cpu
            print(json.dumps(done), flush=True)
        if busy:
            piece = slice(at, at + PIECE_BYTES)
            np.copyto(target[piece], source[piece])
            copied += len(target[piece])
            at = (at + PIECE_BYTES) % array_bytes


if __name__ == "__main__":
    work(int(sys.argv[1]))
