"""Every message that the page of troubles quotes is one that the source still has."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/troubleshooting.md"
QUOTED = re.findall(r"```text\n(.*?)\n```", PAGE.read_text(encoding="utf-8"), re.S)

FEWEST_LETTERS = 8
"""Of a piece between two values: shorter ones are found anywhere and prove nothing."""


@functools.cache
def sources() -> dict[str, str]:
    """What each source file says, with the pieces of a broken string put together again."""
    found = {}
    for path in [*(ROOT / "cxl_offload").rglob("*.py"), *(ROOT / "csrc").rglob("*.cc")]:
        text = path.read_text(encoding="utf-8").replace('\\"', '"')
        found[str(path.relative_to(ROOT))] = re.sub(r"""["']\s*\n\s*f?["']""", "", text)
    return found


def pieces(message: str) -> list[str]:
    """What is fixed in a message: around values in angle brackets, and apart at punctuation.

    A message is often put together where a bracket or a semicolon is.
    """
    found = (each.strip() for each in re.split(r"<[^>]*>|[();]", message))
    return [each for each in found if len(each) >= FEWEST_LETTERS]


def files_with(message: str) -> list[str]:
    wanted = pieces(message)
    return [name for name, text in sources().items() if all(each in text for each in wanted)]


def test_messages_are_quoted() -> None:
    assert len(QUOTED) > 20
    assert all(pieces(message) for message in QUOTED)


@pytest.mark.parametrize("message", QUOTED, ids=lambda message: message[:50])
def test_quoted_message_is_in_one_source_file(message: str) -> None:
    assert files_with(message), pieces(message)


def test_message_that_nobody_says_is_not_found() -> None:
    assert not files_with("place <bytes>: the moon is full of nodes; ask for less")
