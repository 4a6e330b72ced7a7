"""The drawn pictures are what their scripts draw, and the check for the network sees."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.metrics.record_board import texts

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.slow(reason="draws every picture")
def test_pictures_are_what_the_scripts_draw(tmp_path: Path) -> None:
    for script in ("draw.py", "board.py"):
        subprocess.run([sys.executable, str(DOCS / "pictures" / script), str(tmp_path)], check=True)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in (DOCS / "pictures").glob("*.svg")}
    assert drawn == kept, "draw them again: python docs/pictures/{draw,board}.py"


@pytest.fixture(scope="module")
def offline() -> ModuleType:
    pytest.importorskip("sphinx", reason="the site's tools are not installed; make docs does it")
    spec = importlib.util.spec_from_file_location("offline", DOCS / "_extensions/offline.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "text",
    [
        '<script async src="https://a.example/x.js"></script>',
        "<img alt=y src='//a.example/x.png'>",
        '<link rel="stylesheet" href="https://a.example/x.css">',
        "@font-face { src: url(https://a.example/x.woff2) }",
        '@import "https://a.example/x.css";',
    ],
)
def test_what_a_browser_fetches_is_found(offline: ModuleType, text: str) -> None:
    (found,) = offline.fetched_addresses(text)
    assert "//a.example/x" in found


def test_links_and_own_files_are_not_fetched_elsewhere(offline: ModuleType) -> None:
    text = '<a href="https://a.example/">x</a><script src="_static/x.js"></script>'
    text += '<svg xmlns="http://www.w3.org/2000/svg"></svg><link rel="icon" href="x.png">'
    assert offline.fetched_addresses(text) == []


def test_picture_of_the_board_is_of_its_queries_as_they_are_now() -> None:
    """And of answers: a query that was changed must be asked again."""
    recorded = json.loads((DOCS / "pictures/board_answers.json").read_text())
    asked = [answer["query"] for answer in recorded["answers"]]
    assert asked == texts(recorded["seconds"]), "ask again: python -m tests.metrics.record_board"
    silent = [answer["query"] for answer in recorded["answers"] if not answer["series"]]
    assert len(silent) <= 3, silent  # a machine that counts no errors of memory
    assert (DOCS / "pictures/board.svg").stat().st_size < 150_000
