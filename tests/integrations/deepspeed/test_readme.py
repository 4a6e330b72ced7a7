"""The README's snippet, saved and started as it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from .conftest import ROOT, environment


def test_snippet_of_the_readme_runs_as_pasted(deepspeed_there: None, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, re.S)
    (snippet,) = (block for block in blocks if "deepspeed" in block)
    script = tmp_path / "train.py"
    script.write_text(snippet)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", str(script)],
        cwd=tmp_path,
        env=environment(2),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines() if "exp_avg" in line]
    assert {row[0] for row in rows} >= {"exp_avg", "exp_avg_sq"}, done.stdout[-2000:]
