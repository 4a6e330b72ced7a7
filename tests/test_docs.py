"""Every Python example that the documentation shows runs as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import cxl_offload
from cxl_offload import Session, load_machine

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def examples() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for block in re.finditer(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
            line = page.read_text(encoding="utf-8")[: block.start()].count("\n") + 1
            yield f"{page.name}:{line}", block.group(1)


EXAMPLES = dict(examples())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the examples expect to find: a model, and prompts."""
    from cxl_offload.integrations.flexgen import OptShape, make_opt

    made = tmp_path_factory.mktemp("docs")
    make_opt(made / "my-opt", OptShape(layers=2, hidden=64, heads=4))
    (made / "prompts.txt").write_text("Measure first, then\n")
    return made


@pytest.mark.parametrize("where", EXAMPLES)
def test_example_runs_as_shown(where: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    names: dict[str, object] = {"__name__": "example"}
    exec(compile("import cxl_offload, torch", where, "exec"), names)
    # Three nodes, so that examples of several tiers have them.
    with cxl_offload.use(Session.simulated(load_machine("epyc9354-cxl-a"))):
        exec(compile(EXAMPLES[where], where, "exec"), names)


def test_there_are_examples_in_the_readme_and_the_guides() -> None:
    assert {where.partition(":")[0] for where in EXAMPLES} >= {"README.md", "memory.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
