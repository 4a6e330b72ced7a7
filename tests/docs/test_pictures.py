"""The drawn pictures are what their script draws, and the check for the network sees."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_pictures_are_what_the_script_draws(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(DOCS / "pictures/draw.py"), str(tmp_path)], check=True)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in (DOCS / "pictures").glob("*.svg")}
    assert drawn == kept, "draw them again: python docs/pictures/draw.py"


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
