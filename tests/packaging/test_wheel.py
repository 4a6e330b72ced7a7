"""A wheel in an empty environment: commands, tests that need no framework, and nothing left."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from .trial import ROOT, call, try_wheel

pytestmark = pytest.mark.slow(reason="builds a wheel and installs it, with what it requires")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    call(sys.executable, "-m", "pip", "wheel", *options, ROOT, cwd=folder)
    (made,) = folder.glob("*.whl")
    return made


def test_wheel_asks_for_no_library_that_a_linux_may_lack(wheel: Path) -> None:
    pytest.importorskip("auditwheel")
    said = call(sys.executable, "-m", "auditwheel", "show", wheel, cwd=wheel.parent)
    assert '"manylinux_' in " ".join(said.split())


def test_wheel_needs_nothing_of_torch_so_one_serves_every_torch(wheel: Path) -> None:
    pytest.importorskip("elftools")
    from .contents import libraries, needed_from_others, processor

    held = libraries(wheel)
    assert [name for name in held if name.startswith("cxl_offload/_C.")]
    assert {name: needed_from_others(library) for name, library in held.items()} == {
        name: [] for name in held
    }
    assert len({processor(library) for library in held.values()}) == 1


def test_library_of_torch_is_found_by_its_name_and_its_symbols() -> None:
    """What the test above looks for is seen where it is."""
    pytest.importorskip("elftools")
    torch = pytest.importorskip("torch")
    from .contents import needed_from_others

    (library,) = Path(torch.__file__).parent.glob("_C.*.so")
    found = needed_from_others(library.read_bytes())
    assert {"libtorch_python.so", "initModule"} <= set(found)


def test_wheel_holds_the_data_of_the_package(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    for name in (
        "cxl_offload/py.typed",
        "cxl_offload/_C.pyi",
        "cxl_offload/configs/machines/epyc9354-cxl-a.yaml",
        "cxl_offload/configs/grafana/dashboards/cxl_offload.json",
        "cxl_offload/integrations/autostart/sitecustomize.py",
    ):
        assert name in held
    assert not [name for name in held if name.startswith(("tests", "csrc", "configs"))]


def test_wheel_in_an_empty_environment_works_and_goes_without_a_trace(
    wheel: Path, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    call(sys.executable, "-m", "venv", environment, cwd=tmp_path)
    try_wheel(wheel, environment, (environment / "bin" / "python", "-m", "pip"))
