"""Keeps what a real Prometheus answers to every query of the board, for its picture.

    python -m tests.metrics.record_board SECONDS FILE

Two processes are scraped: one that works on simulated nodes, and one with memory of this machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.metrics.board import queries, read_board
from tests.metrics.real_prometheus import RealPrometheus, Series

_SCRAPE_S = 1
_POINTS = 60


def _started(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.metrics.board_work", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def _short(text: str) -> float:
    return float(f"{float(text):.5g}")


def _kept(series: Series, end: float) -> dict[str, Any]:
    """Labels, and points as (seconds before the end, value)."""
    points = series.get("values") or [series["value"]]
    return {
        "labels": series["metric"],
        "points": [[round(float(at) - end, 1), _short(value)] for at, value in points],
    }


def step_s(seconds: int) -> int:
    """Between two points of a range."""
    return max(seconds // _POINTS, 1)


def texts(seconds: int) -> list[str]:
    """Every query of the board as Grafana asks it, in the board's order."""
    rate_interval = f"{max(step_s(seconds) + _SCRAPE_S, 4 * _SCRAPE_S)}s"
    return [query.filled(instance=".+", rate_interval=rate_interval) for query in queries()]


def ask_all(prometheus: RealPrometheus, seconds: int) -> list[dict[str, Any]]:
    """All answers, in the board's order."""
    end = time.time()
    targets = [
        (panel["id"], target) for panel in read_board()["panels"] for target in panel["targets"]
    ]
    found = []
    for (panel, target), text in zip(targets, texts(seconds), strict=True):
        answer = (
            prometheus.query(text)
            if target.get("instant")
            else prometheus.query_range(text, end - seconds, end, f"{step_s(seconds)}s")
        )
        series = [_kept(each, end) for each in answer]
        found.append({"panel": panel, "target": target["refId"], "query": text, "series": series})
    return found


def main(seconds: int, file: Path) -> None:
    works = [_started(), _started("real")]
    try:
        targets = [f"127.0.0.1:{_port(work)}" for work in works]
        with (
            tempfile.TemporaryDirectory() as folder,
            RealPrometheus(Path(folder), targets, every_s=_SCRAPE_S) as prometheus,
        ):
            time.sleep(seconds)
            answers = ask_all(prometheus, seconds)
    finally:
        for work in works:
            work.terminate()
            work.wait()
    lines = ",\n".join(json.dumps(answer) for answer in answers)
    file.write_text(f'{{"seconds": {seconds}, "answers": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
