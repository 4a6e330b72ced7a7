"""The command with torchrun that the page shows, started as it is shown."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ...docs.blocks import ROOT, read_blocks
from .commands import MACHINE, run

pytestmark = pytest.mark.slow(reason="torchrun and its two processes import torch and transformers")


def shown() -> list[str]:
    """The words of the command."""
    blocks = read_blocks(ROOT / "docs/transformers.md")
    (text,) = (each.text for each in blocks if "\ntorchrun" in each.text)
    return shlex.split(text.replace("\\\n", " "), comments=True)


def of_torchrun(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The commands are those beside this Python; the port is a free one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        words,
        cwd=folder,
        env={**env, "PET_MASTER_PORT": str(port)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.parametrize("divided", ["rows", "tensors"])
def test_command_of_the_page_gives_the_answers_of_one_process(
    divided: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my-llama").symlink_to(folder)
    (tmp_path / "examples").mkdir()
    shutil.copy(folder / "prompts.txt", tmp_path / "examples")
    words = shown()
    assert words[-2:] == ["--ranks", "tensors"]
    words[-1] = divided
    more = ["--machine", MACHINE, "--gen-len", "6", "--output"]
    done = of_torchrun([*words, *more, "together.json"], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "by 2 ranks" in " ".join(done.stdout.split())
    monkeypatch.chdir(tmp_path)
    alone = words[words.index("generate") : -2]
    assert run([*alone, *more, "alone.json"]) == 0
    one, two = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("alone", "together")
    )
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert two["tokens"] == one["tokens"]
    assert two["answers"] == one["answers"]


def test_what_ranks_refuse_is_said_in_one_line_and_ends_torchrun(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "my-llama").symlink_to(folder)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/prompts.txt").write_text("40 41\n")
    words = [*shown()[:-1], "rows", "--machine", MACHINE]
    done = of_torchrun(words, tmp_path)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if "1 prompts for 2 ranks" in line]
    assert said, done.stderr[-3000:]
    assert all("cxl-offload: error: " in line for line in said)
