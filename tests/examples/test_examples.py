"""Every example runs as it stands, and the cells of the notebook one after the other."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"
ZEN = "Errors should -> never pass silently."


FIRST_WITH_TORCH = ("zen.py", "train_and_serve.py", "train_gpt_zero_offload.py")


@pytest.mark.parametrize("name", FIRST_WITH_TORCH)
def test_example_without_its_packages_names_the_first_and_the_extra(name: str) -> None:
    """``-S`` hides all that is installed."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-S", str(EXAMPLES / name), "never-made"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{name}: torch is not installed; pip install '.[transformers]'")


def run(name: str) -> str:
    path = os.pathsep.join(filter(None, [str(EXAMPLES.parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_discover_names_the_tiers_of_this_machine() -> None:
    assert "tier ldram: " in run("discover.py")


def test_place_and_move_shows_requested_against_granted() -> None:
    printed = run("place_and_move.py")
    assert "weights: bind to nodes {2} -> node 2: 16 MiB (simulated pages)" in printed
    assert "moved: bind to nodes {0} -> node 0: 4 MiB (simulated pages)" in printed
    assert "tier cxl: 8 MiB held, 24 MiB at most" in printed


def test_one_more_card_makes_the_plan_faster() -> None:
    printed = run("plan_system_a.py").splitlines()
    rates = [
        float(re.findall(r"([\d.]+) tokens/s predicted", line)[0])
        for line in printed
        if "predicted" in line
    ]
    assert len(rates) == 2
    assert rates[1] > rates[0] > 0


@pytest.mark.skipif(find_spec("vllm") is not None, reason="with it: test_trained_example.py")
def test_what_was_trained_in_tiers_is_served_by_transformers_and_flexgen() -> None:
    printed = run("train_and_serve.py")
    assert "vllm is not installed: left out" in printed
    for engine in ("transformers", "FlexGen"):
        assert f"{engine}: {ZEN}" in printed
    assert "WRONG" not in printed
    assert "FlexGen: kv asked for " in printed


@pytest.mark.skipif(find_spec("vllm") is not None, reason="with it: test_kept_example.py")
def test_blocks_of_a_killed_writer_are_found_and_a_spoilt_one_is_named() -> None:
    printed = run("kv_survives.py")
    (last,) = re.findall(r"killed after block (\d+) of 4 MiB was finished", printed)
    assert re.search(r"opened again: (\d+) of \1 are there, \1 are right", printed)
    assert f"block {last} was spoilt in the file; the check names ['{int(last):016x}']" in printed
    assert "vLLM is not installed" in printed


def test_cells_of_the_notebook_run_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    monkeypatch.syspath_prepend(str(EXAMPLES))
    shared: dict[str, object] = {"__name__": "notebook"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                assert cell["outputs"] == []  # of nobody's machine
                exec(compile("".join(cell["source"]), cell["id"], "exec"), shared)
    assert ZEN in printed.getvalue()
    assert "with one more card" in printed.getvalue()
    assert "was spoilt in the file; the check names" in printed.getvalue()


def test_list_of_the_examples_names_every_file() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    parts = {"demo_progress.py", "demo_report.py", "gpt_text.py", "gpt_trainers.py"}
    parts |= {"needs_transformers.py", "prompts.txt", "README.md"}
    for file in EXAMPLES.iterdir():
        if file.is_file() and file.name not in parts:
            assert f"`{file.name}`" in listed, file.name
