"""Programs without a standard output (``>&-``), as some services start them."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("arguments", [["topology", "--list"], ["doctor"], ["--version"]])
def test_closed_standard_output_is_no_error(arguments: list[str]) -> None:
    command = " ".join([sys.executable, "-m", "cxl_offload.cli.main", *arguments, ">&-"])
    ended = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=600, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
