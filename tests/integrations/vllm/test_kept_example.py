"""The example that kills an engine of the real vLLM, as a user starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cxl_offload.kept import find_kept

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(600)
def test_engine_after_a_killed_one_finds_its_blocks_and_answers_the_same(vllm: None) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "kv_survives.py")],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "vLLM: 4 of 4 answers are the same tokens" in done.stdout
    assert "not the Zen" not in done.stdout
    found = re.findall(r"(\d+), then (\d+) of (\d+) tokens found", done.stdout)
    assert len(found) == 4
    for before, after, asked in found:
        assert int(before) == 0
        assert 0 < int(after) < int(asked)
    assert not [file for file in find_kept() if file.name.startswith("example-")]
