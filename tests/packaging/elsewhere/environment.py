"""Environments whose interpreter belongs to another system, run on this one without a container."""

from __future__ import annotations

import platform
import shlex
import sys
from pathlib import Path

from .debian import CannotBuildError, Python

LOADERS = {"aarch64": "ld-linux-aarch64.so.1", "x86_64": "ld-linux-x86-64.so.2"}


def is_foreign(python: Python) -> bool:
    return python.processor != platform.machine()


def command_of(python: Python) -> list[str]:
    """How to start it: by QEMU, or by its own C library's loader; ``$0`` stays the program's name.

    The name tells Python which environment it is in, and is what it starts children with.
    """
    program = str(python.program)
    if is_foreign(python):
        emulator = f"qemu-{python.processor}"
        return [emulator, "-L", str(python.root), "-0", "$0", program]
    name = LOADERS[python.processor]
    loader = next((at / name for at in python.library_folders if (at / name).exists()), None)
    if loader is None:
        raise CannotBuildError(f"{python.root} has no {name}: its C library is missing")
    folders = ":".join(map(str, python.library_folders))
    return [str(loader), "--library-path", folders, "--argv0", "$0", program]


def make_environment(python: Python, folder: Path) -> Path:
    """An empty virtual environment without pip, which Debian keeps apart; see `pip_for`."""
    (folder / "bin").mkdir(parents=True)
    (folder / "lib" / f"python{python.version}" / "site-packages").mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text(
        f"home = {python.program.parent}\n"
        "include-system-site-packages = false\n"
        f"version = {python.version}\n"
    )
    words = (f'"{word}"' if word == "$0" else shlex.quote(word) for word in command_of(python))
    interpreter = folder / "bin" / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {" ".join(words)} "$@"\n')
    interpreter.chmod(0o755)
    return folder


def pip_for(environment: Path) -> tuple[str | Path, ...]:
    """This interpreter's pip, run by the environment's."""
    return (sys.executable, "-m", "pip", "--python", environment / "bin" / "python")
