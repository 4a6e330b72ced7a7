"""The example that trains a model and serves it, with the real vLLM, as a user starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(600)
def test_what_was_trained_in_tiers_is_served_by_vllm_from_tiers(vllm: None) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "train_and_serve.py")],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    for engine in ("transformers", "vLLM"):
        assert f"{engine}: Errors should -> never pass silently." in done.stdout
    assert "WRONG" not in done.stdout
    (found,) = re.findall(r"vLLM: asked again, (\d+) tokens came out of the tiers", done.stdout)
    assert int(found) >= 32  # a block
