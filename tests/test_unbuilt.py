"""Where the C++ core cannot be loaded, the import says so.

That is a source tree in which nothing was built, which would hide an installed package, and a
subinterpreter, in which it would wait forever.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


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


_IN_A_SUBINTERPRETER = """
import sys
if sys.version_info >= (3, 13):
    import _interpreters as interpreters
    run = interpreters.exec
else:
    import _xxsubinterpreters as interpreters
    run = interpreters.run_string
code = "import cxl_offload; cxl_offload.discover()"
code += "\\ntry: {statement}\\nexcept ImportError as error: print(error, flush=True)"
run(interpreters.create(), code)
"""


@pytest.mark.parametrize("statement", ["import cxl_offload._C", "from cxl_offload import _C"])
def test_core_in_a_subinterpreter_is_refused_in_one_line(statement: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IN_A_SUBINTERPRETER.format(statement=statement)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.strip().splitlines()
    assert line.startswith("cxl_offload._C loads in the main interpreter only")
