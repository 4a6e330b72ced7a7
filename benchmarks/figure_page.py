"""The tables of docs/figures.md, so that no number of that page is typed."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.figure_parts import CLOSE, Paper, Point
from benchmarks.markdown_tables import filled, markdown_table

WORST = 10
"""Rows of the table that begins the page."""


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
    return markdown_table(head, rows)


def _of_all(papers: Sequence[Paper]) -> list[tuple[str, Point]]:
    """Every published number with the name of its paper, the worst first."""
    found = [(paper.name, one) for paper in papers for one in paper.points()]
    return sorted(found, key=lambda named: -abs(named[1].error))


def _worst(papers: Sequence[Paper]) -> str:
    names, points = zip(*_of_all(papers)[:WORST], strict=True)
    return table(points, names)


def _counts(papers: Sequence[Paper]) -> str:
    """How many comparisons there are with a paper, and how they end."""
    rows = []
    for paper in papers:
        points = by_error(paper.points())
        close = sum(abs(one.error) <= CLOSE for one in points)
        rows.append([paper.name, str(len(points)), str(close), _error(points[0])])
    within = f"within {CLOSE:.0%}".replace("%", " %")
    return markdown_table(["paper", "comparisons", within, "worst"], rows)


def with_tables(page: str, papers: Sequence[Paper]) -> str:
    """The page with the tables of these papers, and with ``worst`` and ``counts``."""
    tables = {paper.name: table(by_error(paper.points())) for paper in papers}
    return filled(page, tables | {"worst": _worst(papers), "counts": _counts(papers)})


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
