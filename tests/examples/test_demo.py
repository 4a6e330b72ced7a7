"""``make demo``: lines that a reader knows, the same tokens everywhere, and a page at the end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]


def test_demo_completes_the_zen_of_python_and_ends_with_the_page(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), "--output", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for line in (
        "Errors should -> never pass silently.",
        "Simple is -> better than complex.",
        "In the face of -> ambiguity, refuse the temptation to guess.",
        "There should be -> one-- and preferably only one --obvious way to do it.",
    ):
        assert line in done.stdout
    assert "(it says" not in done.stdout
    spoken = re.search(
        r"transformers: the same lines; decode at most ([\d,]+) tokens/s", done.stdout
    )
    assert spoken is not None
    assert int(spoken.group(1).replace(",", "")) > 0
    steps = re.findall(r"^\[(\d+)/(\d+)\] (?!tokens|layers|tensors|steps)", done.stdout, re.M)
    assert [int(at) for at, _ in steps] == list(range(1, int(steps[0][1]) + 1))
    assert done.stdout.rstrip().splitlines()[-1].startswith(f"written: {tmp_path / 'demo.html'}")
    page = (tmp_path / "demo.html").read_text()
    for said in ("never pass silently.", "epyc9354-cxl-a", "simulated", "the same in all runs"):
        assert said in page
    assert page.count("never pass silently.") == 2
    assert "by transformers, its weights there too" in page
    for title in (
        "at the peak: system A, by kind",
        "Timeline of the first steps of decode: system",
    ):
        assert title in page
    assert not re.search(r"\de\+\d", page)
    names = [run["name"] for run in json.loads((tmp_path / "demo.json").read_text())]
    assert "system A, by kind" in names
