"""``cxl-offload generate`` as tests call it, with a tiny checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from cxl_offload.cli.main import main

MACHINE = "epyc9354-cxl-a"


def command(folder: Path, *more: str) -> list[str]:
    prompts = str(folder / "prompts.txt")
    return ["generate", "--model", str(folder), "--prompts", prompts, "--machine", MACHINE, *more]


def run(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)
