"""The fenced blocks of the README and of all pages."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# What a block that no test runs begins with, for the reader: the reason.
_MARK = re.compile(r"# (needs|takes) \w+")
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.S | re.M)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block. ``line`` is that of its fence, from 1."""

    page: str
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_marked(self) -> bool:
        """Whether it says why no test runs it."""
        return _MARK.match(self.text) is not None


def read_blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    name = str(page.relative_to(ROOT))
    return [
        Block(name, text[: each.start()].count("\n") + 1, each.group(1).strip(), each.group(2))
        for each in _FENCE.finditer(text)
    ]


def all_blocks(language: str) -> list[Block]:
    return [each for page in PAGES for each in read_blocks(page) if each.language == language]


def make_model(folder: Path) -> None:
    """What ``python examples/zen.py my-opt`` makes in a folder, without the training."""
    from cxl_offload.integrations.flexgen import OptShape, make_opt

    sys.path.append(str(ROOT / "examples"))
    from gpt_text import make_tokenizer

    sys.path.pop()
    model = make_opt(folder / "my-opt", OptShape(layers=2, hidden=64, heads=4))
    make_tokenizer().save_pretrained(model)
    (model / "prompts.txt").write_text("Errors should\nSimple is\n", encoding="utf-8")
