"""A wheel tried as a new user would: installed where nothing is, used, tested, uninstalled."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("topology", "sim")
"""Their tests need no framework."""
TOOLS = ("pytest", "pytest-timeout", "hypothesis")
SHARED = ("fixtures", "memory")
"""Machines that the tests of those rooms are run on."""
NOT_EMULATED = (
    # QEMU refuses mbind, and doctor says that nothing can be placed.
    "tests/topology/test_hazards.py::test_command_looks_at_this_machine_and_really_places_a_page",
)
EMULATED = 10
"""How many times slower an emulated processor is, in about."""


def call(*words: str | Path, cwd: Path, home: Path | None = None, patience: int = 1) -> str:
    """Without this process's environment: what a new user has."""
    environment = {key: os.environ[key] for key in ("HOME", "PATH") if key in os.environ}
    environment |= {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    if patience > 1:
        environment["CXL_OFFLOAD_TEST_PATIENCE"] = str(patience)
    environment |= {"HOME": str(home)} if home else {}
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900 * patience,
        check=False,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def required(wheel: Path) -> list[str]:
    """What it requires without any extra."""
    with zipfile.ZipFile(wheel) as held:
        (name,) = (each for each in held.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(held.read(name))
    return [each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each]


def installed(environment: Path) -> set[Path]:
    """Files of an environment that an installation may leave, bytecode aside."""
    found = (path for path in environment.rglob("*") if path.is_file())
    return {path for path in found if path.suffix != ".pyc"}


def use_commands(environment: Path, folder: Path) -> None:
    """The commands that a reader tries first; they leave no file where they run or at home."""
    command = environment / "bin" / "cxl-offload"
    place, home = folder / "place", folder / "home"
    place.mkdir()
    home.mkdir()
    assert "tier" in call(command, "topology", cwd=place, home=home)
    call(command, "doctor", cwd=place, home=home)
    plan = ("plan", "inference", "--model", "opt-30b", "--machine", "epyc9354-cxl-a")
    said = call(command, *plan, cwd=place, home=home)
    assert "tokens/s predicted" in " ".join(said.split())
    assert "not installed" in call(command, "env", cwd=place, home=home)
    assert [*place.iterdir(), *home.iterdir()] == []


def run_tests(environment: Path, folder: Path, *, emulated: bool = False) -> str:
    """The rooms that need no framework, without the source tree around them; the last line."""
    tests = folder / "tests"
    tests.mkdir()
    for name in ("__init__.py", "conftest.py"):
        shutil.copy(ROOT / "tests" / name, tests)
    for room in (*ROOMS, *SHARED):
        shutil.copytree(ROOT / "tests" / room, tests / room)
    shutil.copy(ROOT / "pyproject.toml", folder)
    rooms = [f"tests/{room}" for room in ROOMS]
    words = [environment / "bin" / "python", "-m", "pytest", "-o", "addopts=", *rooms]
    if emulated:
        words += [f"--deselect={test}" for test in NOT_EMULATED]
    last = (
        call(*words, cwd=folder, patience=EMULATED if emulated else 1).splitlines()[-1].strip("= ")
    )
    assert " passed" in last
    return last


def try_wheel(
    wheel: Path, environment: Path, pip: tuple[str | Path, ...], *, emulated: bool = False
) -> str:
    """All of it, in an environment that holds nothing; ``pip`` is the command that fills it.

    Returns
    -------
    str
        What pytest said last.
    """
    folder = environment.parent
    pip = (*pip, "--quiet", "--disable-pip-version-check")
    pinned = ("-c", ROOT / "constraints.txt")
    patience = EMULATED if emulated else 1
    call(*pip, "install", *pinned, *required(wheel), *TOOLS, cwd=folder, patience=patience)
    before = installed(environment)
    call(*pip, "install", *pinned, wheel, cwd=folder, patience=patience)

    use_commands(environment, folder)
    last = run_tests(environment, folder, emulated=emulated)

    call(*pip, "uninstall", "--yes", "cxl_offload", cwd=folder, patience=patience)
    assert installed(environment) - before == set()
    assert not list(environment.rglob("cxl_offload"))
    return last
