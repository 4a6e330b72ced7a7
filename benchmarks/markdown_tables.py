"""Tables of pages that programs write, so that no number there is typed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.S)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The lines of a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def filled(page: str, tables: Mapping[str, str]) -> str:
    """The page with its tables written anew; the text between them stays.

    A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``.

    Raises
    ------
    ValueError
        A table has no place on the page, or more than one; or a place has no table.
    """
    left = dict(tables)

    def fill(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        if name not in left:
            raise ValueError(f"the page has a place for {name!r} twice, or there is no such table")
        return f"{begin}\n{left.pop(name)}\n{end}"

    text = _TABLE.sub(fill, page)
    if left:
        raise ValueError(f"the page has no place for {min(left)!r}")
    return text
