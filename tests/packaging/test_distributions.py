"""What a source distribution holds, and what its metadata says."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile
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
def sdist(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> tarfile.TarFile:
    """Made from a copy of what git keeps, as a clone has it."""
    clone = tmp_path_factory.mktemp("clone")
    for name in tracked:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, clone / name)
    subprocess.run([sys.executable, "-c", BUILD], cwd=clone, check=True, capture_output=True)
    (made,) = (clone / "dist").glob("*.tar.gz")
    return tarfile.open(made)


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
