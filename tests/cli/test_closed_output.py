"""Programs without a standard output (``>&-``), as some services start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("arguments", [["topology", "--list"], ["doctor"], ["--version"]])
def test_closed_standard_output_is_no_error(arguments: list[str]) -> None:
    command = " ".join([sys.executable, "-m", "cxl_offload.cli.main", *arguments, ">&-"])
    ended = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=600, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


MACHINE = ["--machine", "epyc9354-cxl-a"]
PLAN = ["--model", "opt-1.3b", *MACHINE]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["plan", "inference", *PLAN, "--executor", "transformers"], "--output"),
        (["plan", "inference", *PLAN, "--executor", "transformers", "--json"], "--report"),
        (["plan", "training", *PLAN], "--output"),
        (["doctor"], "--report"),
        (["validate", "--failed"], "--plot"),
    ],
)
def test_files_are_written_where_the_reader_stops_early(
    arguments: list[str], option: str, tmp_path: Path
) -> None:
    """As of `| head -3`: the other end of the pipe is closed before anything is printed."""
    file = tmp_path / "written.png"
    if option == "--plot":
        pytest.importorskip("matplotlib")
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "cxl_offload.cli.main", *arguments, option, str(file)],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert ended.returncode == 1, "nobody read it"
    assert "Traceback" not in ended.stderr
    assert file.stat().st_size > 0
