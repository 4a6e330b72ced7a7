"""``cxl-offload run`` in a process of its own, and a stand-in for an absent framework."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Stands in for the adapter in a script, which then imports the stand-in of DeepSpeed.
SCRIPT = """
import sys, types
assert "torch" not in sys.modules and "cxl_offload" not in sys.modules, "imported too early"
adapter = types.ModuleType("cxl_offload.integrations.deepspeed")
def start(*, on_placed):
    import os
    print("plan", os.environ["CXL_OFFLOAD_PLAN"], "engine", sys.modules["deepspeed"].ENGINE)
    if "--no-engine" not in sys.argv:
        on_placed(None)
adapter.start_from_environment = start
sys.modules[adapter.__name__] = adapter
import importlib.util
assert importlib.util.find_spec("deepspeed") is not None  # a look is not an import
print("before")
import deepspeed.ops
import deepspeed
print("after", deepspeed.ops.NAME, type(deepspeed.__loader__).__name__)
"""


def stand_in(folder: Path) -> Path:
    """Writes a script, and a package that looks like DeepSpeed."""
    package = folder / "frameworks" / "deepspeed"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("ENGINE = 'loaded'\n")
    (package / "ops.py").write_text("NAME = 'ops'\n")
    (folder / "train.py").write_text(SCRIPT)
    return folder


def run(
    *words: str, folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    path = [] if folder is None else [str(folder / "frameworks")]
    given = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, str(ROOT)]), **environment}
    command = [sys.executable, "-m", "cxl_offload.cli.main", "run", *words]
    return subprocess.run(
        command, env=given, cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
