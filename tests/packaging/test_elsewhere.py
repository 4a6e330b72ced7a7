"""Environments of another system's Python; ``make wheel-for`` builds and tries wheels in them."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

import pytest

from .elsewhere.debian import SUITES, CannotBuildError, Python, unpack_python
from .elsewhere.environment import make_environment
from .trial import ROOT

FOREIGN = "aarch64" if platform.machine() == "x86_64" else "x86_64"


def started(python: Python, folder: Path, starter: Path) -> list[str]:
    """The words that ``starter``, which stands in for what runs the interpreter, is given."""
    starter.parent.mkdir(parents=True, exist_ok=True)
    starter.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    starter.chmod(0o755)
    interpreter = make_environment(python, folder / "an environment") / "bin" / "python"
    path = f"{starter.parent}:{os.environ['PATH']}"
    words = [interpreter, "-c", "print('one word')"]
    done = subprocess.run(words, env={"PATH": path}, capture_output=True, text=True, check=True)
    *before, option, script = done.stdout.splitlines()
    assert (option, script) == ("-c", "print('one word')")
    return before


def test_python_of_another_processor_is_emulated_and_knows_its_environment(tmp_path: Path) -> None:
    python = Python("3.13", FOREIGN, tmp_path / "its root")
    words = started(python, tmp_path, tmp_path / "bin" / f"qemu-{FOREIGN}")
    name = str(tmp_path / "an environment/bin/python")
    assert words == ["-L", str(python.root), "-0", name, str(python.program)]
    settings = (tmp_path / "an environment/pyvenv.cfg").read_text()
    assert f"home = {python.program.parent}\n" in settings


def test_python_of_another_debian_runs_with_the_c_library_beside_it(tmp_path: Path) -> None:
    python = Python("3.13", platform.machine(), tmp_path / "its root")
    name = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
    loader = python.library_folders[0] / name[platform.machine()]
    words = started(python, tmp_path, loader)
    assert words[0] == "--library-path"
    assert str(loader.parent) in words[1].split(":")
    assert words[2:] == [
        "--argv0",
        str(tmp_path / "an environment/bin/python"),
        str(python.program),
    ]


def test_python_that_no_debian_has_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CannotBuildError, match=r"Python 3\.12: Debian has it for 3\.11"):
        unpack_python("3.12", "x86_64", tmp_path, archive=None)


def test_classifiers_and_the_page_name_the_pythons_that_were_tried() -> None:
    classified = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert classified == list(SUITES)
    page = (ROOT / "docs" / "packages.md").read_text()
    _, _, tried = page.partition("## What was tried")
    assert set(re.findall(r"^\| (3\.\d+) \|", tried, re.M)) == set(SUITES)
