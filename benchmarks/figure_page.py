"""The tables of docs/figures.md, so that no number of that page is typed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.figure_parts import CLOSE, Paper, Point

WORST = 10
"""Rows of the table that begins the page."""

_TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.S)


def by_error(points: Sequence[Point]) -> list[Point]:
    """The worst first."""
    return sorted(points, key=lambda one: -abs(one.error))


def _published(one: Point) -> str:
    number = f"{one.low:.3g}" if one.low == one.high else f"{one.low:.3g} to {one.high:.3g}"
    return " ".join(part for part in (one.bound, number, one.unit) if part)


def _error(one: Point) -> str:
    if one.bound and one.error == 0:
        return "within"
    if one.high > one.low and one.error == 0:
        return "within"
    return f"{one.error:+.0%}".replace("%", " %").replace("-0 ", "0 ").replace("+0 ", "0 ")


def table(points: Sequence[Point], papers: Sequence[str] = ()) -> str:
    """Rows of a table in Markdown; with ``papers``, the paper of each point in a column."""
    head = ["what", "published", "here", "off", "where"]
    rows = [
        [
            one.what,
            _published(one),
            f"{one.predicted:.3g} {one.kind}",
            _error(one),
            one.where,
        ]
        for one in points
    ]
    if papers:
        head = ["paper", *head]
        rows = [[paper, *row] for paper, row in zip(papers, rows, strict=True)]
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _of_all(papers: Sequence[Paper]) -> list[tuple[str, Point]]:
    """Every published number with the name of its paper, the worst first."""
    found = [(paper.name, one) for paper in papers for one in paper.points()]
    return sorted(found, key=lambda named: -abs(named[1].error))


def _worst(papers: Sequence[Paper]) -> str:
    names, points = zip(*_of_all(papers)[:WORST], strict=True)
    return table(points, names)


def _counts(papers: Sequence[Paper]) -> str:
    """How many comparisons there are with a paper, and how they end."""
    lines = [["paper", "comparisons", f"within {CLOSE:.0%}".replace("%", " %"), "worst"]]
    lines.append(["---"] * len(lines[0]))
    for paper in papers:
        points = by_error(paper.points())
        close = sum(abs(one.error) <= CLOSE for one in points)
        lines.append([paper.name, str(len(points)), str(close), _error(points[0])])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_tables(page: str, papers: Sequence[Paper]) -> str:
    """The page with its tables written anew; the text between them stays.

    A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``, where NAME is a paper's,
    ``worst`` or ``counts``.

    Raises
    ------
    ValueError
        A table has no place on the page, or more than one; or a place has no table.
    """
    tables = {paper.name: table(by_error(paper.points())) for paper in papers}
    tables |= {"worst": _worst(papers), "counts": _counts(papers)}

    def filled(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        if name not in tables:
            raise ValueError(f"the page has a place for {name!r} twice, or there is no such table")
        return f"{begin}\n{tables.pop(name)}\n{end}"

    text = _TABLE.sub(filled, page)
    if tables:
        raise ValueError(f"the page has no place for {min(tables)!r}")
    return text


def summary(papers: Sequence[Paper]) -> str:
    """What a run prints: a line a paper."""
    lines = []
    for paper in papers:
        points = by_error(paper.points())
        close = sum(abs(one.error) <= CLOSE for one in points)
        worst = points[0]
        lines.append(
            f"{paper.name}: {close} of {len(points)} within {CLOSE:.0%} of what is published; "
            f"worst: {worst.what}, {_error(worst)}\n"
        )
    return "".join(lines)
