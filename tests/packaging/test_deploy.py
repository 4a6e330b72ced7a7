"""Containers, clusters and the papers of a project: right as documents, and of this version."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml
from typer.testing import CliRunner

import cxl_offload
from cxl_offload.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def options_of(command: str) -> set[str]:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
    return set(re.findall(r"--[a-z][\w-]*", shown))


def own_options(words: list[str]) -> set[str]:
    """Options between ``run`` and the program's name."""
    return {word for word in words[words.index("run") : words.index("--")] if word[:2] == "--"}


def test_pod_has_the_capability_that_placing_needs_and_no_more() -> None:
    pod = yaml.safe_load((DEPLOY / "kubernetes.yaml").read_text())
    (container,) = pod["spec"]["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["SYS_NICE"]}
    assert own_options(container["command"]) <= options_of("run")
    port = pod["metadata"]["annotations"]["prometheus.io/port"]
    assert f"0.0.0.0:{port}" in container["command"]
    (volume,) = pod["spec"]["volumes"]
    assert volume["emptyDir"]["medium"] == "Memory"


def test_batch_job_is_a_script_with_options_that_exist() -> None:
    script = DEPLOY / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    words = script.read_text().replace("\\\n", " ").split("srun", 1)[1].split()
    assert own_options(words) <= options_of("run")


def test_containerfile_and_page_explain_the_same_options() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    page = (ROOT / "docs" / "packages.md").read_text()
    for option in ("--cap-add SYS_NICE", "--shm-size", "--ulimit memlock=-1", "--cpuset-mems"):
        assert option in text
        assert option in page
    assert "USER user" in text  # not root


def test_citation_and_metadata_name_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == cxl_offload.__version__
    assert citation["cff-version"] == "1.2.0"
    assert f'version = "{cxl_offload.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert citation["license"] == "Apache-2.0"
