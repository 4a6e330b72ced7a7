"""What a source distribution holds, and what its metadata says."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"

# Folders that git keeps and a distribution needs; whole, so that nothing is forgotten again.
WHOLE = ("csrc", "configs", "cxl_offload", "docs", "deploy", "examples", "benchmarks", "tests")


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not in a clone: what belongs to it is not known")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def clone(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git keeps, as a clone has it."""
    clone = tmp_path_factory.mktemp("clone")
    for name in tracked:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, clone / name)
    return clone


@pytest.fixture(scope="module")
def sdist(clone: Path) -> tarfile.TarFile:
    subprocess.run([sys.executable, "-c", BUILD], cwd=clone, check=True, capture_output=True)
    (made,) = (clone / "dist").glob("*.tar.gz")
    return tarfile.open(made)


@pytest.mark.slow(reason="builds a source distribution")
def test_source_distribution_holds_every_file_that_building_and_testing_need(
    sdist: tarfile.TarFile, tracked: list[str]
) -> None:
    held = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in sdist.getnames()}
    wanted = {name for name in tracked if name.split("/")[0] in WHOLE}
    wanted |= {
        "Makefile",
        "LICENSE",
        "CHANGELOG.md",
        "README.md",
        "constraints.txt",
        "SECURITY.md",
        "CITATION.cff",
    }
    assert sorted(wanted - held) == []
    assert any(name.endswith(".cu") for name in held)
    assert not [name for name in held if name.endswith((".so", ".pyc"))]


def test_metadata_names_people_licence_and_extras(sdist: tarfile.TarFile) -> None:
    (info,) = (m for m in sdist.getmembers() if re.fullmatch(r"[^/]+/PKG-INFO", m.name))
    file = sdist.extractfile(info)
    assert file is not None
    metadata = email.message_from_bytes(file.read())
    # Outside of the source tree a link into it leads nowhere.
    text = str(metadata.get_payload())
    assert "docs/flexgen.md" in text
    assert set(re.findall(r"\]\((.*?)\)", text)) == {"https://pypi.org/project/flexgen/"}
    assert metadata["Description-Content-Type"].startswith("text/markdown")
    assert metadata["Author"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Operating System :: POSIX :: Linux" in metadata.get_all("Classifier", [])
    extras = {"torch", "deepspeed", "flexgen", "transformers", "vllm", "plot", "metrics", "all"}
    assert set(metadata.get_all("Provides-Extra", [])) == extras


def build(
    clone: Path, command: str, into: Path, **settings: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", "--quiet", command, "--build-lib", str(into)],
        cwd=clone,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )


def test_second_build_holds_nothing_that_was_removed_and_no_library_of_the_tree(
    clone: Path, tmp_path: Path
) -> None:
    """A wheel is made of all that lies in the folder of a build."""
    module, library = clone / "cxl_offload/once.py", clone / "cxl_offload/libcxl_offload_cuda.so"
    module.touch()
    library.touch()  # an editable installation's, perhaps for another processor
    assert build(clone, "build_py", tmp_path).returncode == 0
    assert (tmp_path / "cxl_offload/once.py").is_file()
    module.unlink()
    assert build(clone, "build_py", tmp_path).returncode == 0
    held = {path.name for path in (tmp_path / "cxl_offload").iterdir()}
    assert "__init__.py" in held
    assert held & {module.name, library.name} == set()


def test_cuda_kernels_for_another_processor_than_the_extension_are_refused(
    clone: Path, tmp_path: Path
) -> None:
    x86, arm = (b"\x7fELF".ljust(18, b"\0") + number.to_bytes(2, "little") for number in (62, 183))
    extension = tmp_path / "cxl_offload" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    extension.parent.mkdir()
    extension.write_bytes(arm)
    later = time.time() + 3600
    os.utime(extension, (later, later))  # as if it had just been built
    (tmp_path / "x86").write_bytes(x86)
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp {tmp_path}/x86 "$2"\n')
    nvcc.chmod(0o755)

    done = build(clone, "build_ext", tmp_path, CXL_OFFLOAD_NVCC=str(nvcc))
    assert done.returncode == 1
    assert "another processor" in done.stderr
    assert not (tmp_path / "cxl_offload/libcxl_offload_cuda.so").exists()
    extension.write_bytes(x86)
    os.utime(extension, (later, later))
    done = build(clone, "build_ext", tmp_path, CXL_OFFLOAD_NVCC=str(nvcc))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cxl_offload/libcxl_offload_cuda.so").read_bytes() == x86
