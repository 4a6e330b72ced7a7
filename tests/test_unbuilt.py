"""A source tree in which nothing was built says so, instead of hiding an installed package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_tree_without_its_core_says_what_to_do(tmp_path: Path) -> None:
    import cxl_offload

    package = tmp_path / "cxl_offload"
    package.mkdir()
    for path in Path(cxl_offload.__path__[0]).iterdir():
        if not path.name.startswith("_C."):
            (package / path.name).symlink_to(path)
    done = subprocess.run(
        # Without site: an editable installation would find the core for every such tree.
        [sys.executable, "-S", "-c", "from cxl_offload import _C"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert "is a source tree in which nothing was built" in last
    assert "pip install -e ." in last
