"""A wheel in an empty environment: commands, tests that need no framework, and nothing left."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow(reason="builds a wheel and installs it, with what it requires")

ROOMS = ("topology", "sim")
"""Their tests need no framework."""


def call(*words: str | Path, cwd: Path) -> str:
    """Without this process's environment: what a new user has."""
    environment = {key: os.environ[key] for key in ("HOME", "PATH") if key in os.environ}
    environment |= {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    call(sys.executable, "-m", "pip", "wheel", *options, ROOT, cwd=folder)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with pip alone."""
    folder = tmp_path_factory.mktemp("empty")
    call(sys.executable, "-m", "venv", folder / "env", cwd=folder)
    return folder


def installed(empty: Path) -> set[Path]:
    """Files of the environment that an installation may leave, bytecode aside."""
    found = (path for path in (empty / "env").rglob("*") if path.is_file())
    return {path for path in found if path.suffix != ".pyc"}


def required(wheel: Path) -> list[str]:
    """What it requires without any extra."""
    with zipfile.ZipFile(wheel) as held:
        (name,) = (each for each in held.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(held.read(name))
    return [each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each]


def test_wheel_asks_for_no_library_that_a_linux_may_lack(wheel: Path) -> None:
    pytest.importorskip("auditwheel")
    said = call(sys.executable, "-m", "auditwheel", "show", wheel, cwd=wheel.parent)
    assert '"manylinux_' in " ".join(said.split())


def test_wheel_holds_the_data_of_the_package(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "cxl_offload/py.typed",
        "cxl_offload/configs/machines/epyc9354-cxl-a.yaml",
        "cxl_offload/configs/grafana/dashboards/cxl_offload.json",
        "cxl_offload/integrations/autostart/sitecustomize.py",
    ):
        assert name in held
    assert not [name for name in held if name.startswith(("tests", "csrc", "configs"))]


def test_wheel_in_an_empty_environment_works_and_goes_without_a_trace(
    wheel: Path, empty: Path
) -> None:
    python, command = empty / "env/bin/python", empty / "env/bin/cxl-offload"
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
    pinned = ("-c", ROOT / "constraints.txt")
    call(*pip, "install", *pinned, *required(wheel), cwd=empty)
    call(*pip, "install", *pinned, "pytest", "pytest-timeout", "hypothesis", cwd=empty)
    before = installed(empty)
    call(*pip, "install", *pinned, wheel, cwd=empty)

    nothing = empty / "nothing"
    nothing.mkdir()
    assert "tier" in call(command, "topology", cwd=nothing)
    call(command, "doctor", cwd=nothing)
    plan = ("plan", "inference", "--model", "opt-30b", "--machine", "epyc9354-cxl-a")
    assert "tokens/s (predicted)" in " ".join(call(command, *plan, cwd=nothing).split())
    assert "not installed" in call(command, "env", cwd=nothing)
    assert list(nothing.iterdir()) == []

    tests = empty / "tests"
    tests.mkdir()
    for name in ("__init__.py", "conftest.py"):
        shutil.copy(ROOT / "tests" / name, tests)
    for room in (*ROOMS, "fixtures", "memory"):  # machines of other tests are in memory
        shutil.copytree(ROOT / "tests" / room, tests / room)
    shutil.copy(ROOT / "pyproject.toml", empty)
    rooms = [f"tests/{room}" for room in ROOMS]
    assert " passed" in call(python, "-m", "pytest", "-o", "addopts=", *rooms, cwd=empty)

    call(*pip, "uninstall", "--yes", "cxl_offload", cwd=empty)
    assert installed(empty) - before == set()
    assert not list((empty / "env").rglob("cxl_offload"))
