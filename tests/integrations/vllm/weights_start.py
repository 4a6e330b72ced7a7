"""Starts ``weights_run.py`` with this package as a plugin that vLLM finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["plugin_environment", "result", "run_once"]

ROOT = Path(__file__).resolve().parents[3]


def plugin_environment(folder: Path) -> dict[str, str]:
    """The package as if installed: vLLM finds plugins by the metadata of a distribution."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    made = folder / "cxl_offload-0.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: cxl_offload\nVersion: 0\n")
    lines = ["[vllm.general_plugins]"]
    lines += [f"{k} = {v}" for k, v in project["entry-points"]["vllm.general_plugins"].items()]
    (made / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return dict(
        os.environ,
        PYTHONPATH=os.pathsep.join([str(ROOT), str(folder)]),
        VLLM_CPU_KVCACHE_SPACE="1",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )


def run_once(
    environment: dict[str, str], model: Path, options: dict[str, Any]
) -> subprocess.CompletedProcess[str]:
    """One process, one engine."""
    script = Path(__file__).with_name("weights_run.py")
    return subprocess.run(
        [sys.executable, str(script), str(model), json.dumps(options)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What the process found; its output where it found nothing."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return found
