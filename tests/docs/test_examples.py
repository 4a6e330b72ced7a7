"""Every Python example that the documentation shows runs as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def examples() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for block in re.finditer(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
            line = page.read_text(encoding="utf-8")[: block.start()].count("\n") + 1
            yield f"{page.relative_to(ROOT)}:{line}", block.group(1)


# DeepSpeed's run in a process of its own, in tests/integrations/deepspeed/test_readme.py.
EXAMPLES = {
    where: text for where, text in examples() if "import cxl_offload, deepspeed" not in text
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands around the examples have made: a model, prompts, a plan."""
    from cxl_offload.integrations.flexgen import OptShape, make_opt

    made = tmp_path_factory.mktemp("docs")
    make_opt(made / "my-opt", OptShape(layers=2, hidden=64, heads=4))
    (made / "examples").symlink_to(ROOT / "examples")
    return made


@pytest.mark.parametrize("where", EXAMPLES)
def test_example_runs_as_pasted(where: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without imports of ours, on the machine that this is: what a reader does."""
    monkeypatch.chdir(folder)
    exec(compile(EXAMPLES[where], where, "exec"), {"__name__": "example"})


def test_there_are_examples_in_the_readme_and_the_guides() -> None:
    assert {where.partition(":")[0] for where in EXAMPLES} >= {"README.md", "docs/memory.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
