"""Every Python example that the documentation shows runs as it stands, or says why not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cxl_offload

from .blocks import PAGES, ROOT, all_blocks, make_model

# DeepSpeed's run in a process of its own, in tests/integrations/deepspeed/test_readme.py; Trainer's
# beside a run without it, in tests/integrations/transformers/test_recipes.py.
ELSEWHERE = ("import cxl_offload, deepspeed", " Trainer(")
EXAMPLES = {
    block.where: block.text
    for block in all_blocks("python")
    if not (block.is_marked or any(each in block.text for each in ELSEWHERE))
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands around the examples have made: a model, prompts, a plan."""
    made = tmp_path_factory.mktemp("docs")
    make_model(made)
    (made / "examples").symlink_to(ROOT / "examples")
    return made


@pytest.fixture
def ended_protections(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An example protects its process until it ends; here it ends with the example."""
    survive, begun = cxl_offload.survive_memory_errors, []

    def begin(**options: Any) -> object:
        begun.append(survive(**options))
        return begun[-1]

    monkeypatch.setattr(cxl_offload, "survive_memory_errors", begin)
    yield
    for protection in begun:
        protection.stop()


@pytest.mark.sampled(8)
@pytest.mark.usefixtures("ended_protections")
@pytest.mark.parametrize("where", EXAMPLES)
def test_example_runs_as_pasted(where: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without imports of ours, on the machine that this is: what a reader does."""
    monkeypatch.chdir(folder)
    exec(compile(EXAMPLES[where], where, "exec"), {"__name__": "example"})


def test_marked_examples_are_python() -> None:
    for block in all_blocks("python"):
        compile(block.text, block.where, "exec")


def test_there_are_examples_in_the_readme_and_the_guides() -> None:
    assert {where.partition(":")[0] for where in EXAMPLES} >= {"README.md", "docs/memory.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
