"""Stock FlexGen in a process of its own (stock_flexgen.py), for bench_flexgen.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class StockProcess:
    """Stock FlexGen in a process of its own, which runs one case at a time."""

    def __init__(self, jobs: dict[str, Any], folder: Path) -> None:
        (folder / "jobs.json").write_text(json.dumps(jobs))
        self._errors = (folder / "stock.err").open("w+")
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.stock_flexgen"]
        self._process = subprocess.Popen(
            [*command, folder / "jobs.json"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def run(self, case: str) -> dict[str, Any]:
        """Tokens and seconds of one case."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{case}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._errors.seek(0)
            last = (self._errors.read().strip().splitlines() or ["nothing on stderr"])[-1]
            raise RuntimeError(f"stock FlexGen ended with {status} in {case!r}: {last}")
        return dict(json.loads(line))

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()
