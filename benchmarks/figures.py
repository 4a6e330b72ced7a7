"""The main figures of five papers, drawn from this package's equations, planner and simulator.

Curves are *predicted* or *simulated*; the points over them are *published*, and come from the
cases and the machine files that the package ships. Nothing here is measured.

    python -m benchmarks.figures [PAPER ...] [--out DIR] [--page FILE] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path

from benchmarks.figure_drawing import draw_overview, draw_paper, drawn
from benchmarks.figure_memory import BANDWIDTH, CAPTION, TOPOLOGY
from benchmarks.figure_offloading import HEIMDALL, USE_CASES
from benchmarks.figure_page import summary, with_tables
from cxl_offload.errors import ConfigError
from cxl_offload.files import read_text, write_text

PAPERS = {paper.name: paper for paper in (USE_CASES, BANDWIDTH, TOPOLOGY, CAPTION, HEIMDALL)}
"""By the names on the command line."""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "papers", nargs="*", metavar="PAPER", help=f"{', '.join(PAPERS)}; all unless named"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="writes the pictures there, one a paper"
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="writes the tables of docs/figures.md anew"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the numbers drawn")
    options = parser.parse_args()
    wrong = _wrong(options)
    if wrong:
        parser.exit(2, f"figures: {wrong}\n")
    return options


def _wrong(options: argparse.Namespace) -> str:
    """Why the program does not begin; empty if it does."""
    unknown = [name for name in options.papers if name not in PAPERS]
    if unknown:
        return f"no paper is called {unknown[0]!r}; there are {', '.join(PAPERS)}"
    if options.page and options.papers:
        return "--page writes the tables of all papers; name none of them"
    if options.out and find_spec("matplotlib") is None:
        return "--out needs matplotlib; install it, e.g. pip install matplotlib"
    return ""


def main() -> None:
    """Runs the program."""
    options = _options()
    try:
        _run(options)
    except (ConfigError, OSError) as error:
        said = (
            str(error) if isinstance(error, ConfigError) else f"{error.filename}: {error.strerror}"
        )
        sys.exit(f"figures: {said}")


def _run(options: argparse.Namespace) -> None:
    papers = [PAPERS[name] for name in options.papers or PAPERS]
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        for paper in papers:
            draw_paper(paper, options.out / f"paper-{paper.name}.png")
        if not options.papers:
            draw_overview(papers, options.out / "papers.png")
    if options.page:
        write_text(options.page, with_tables(read_text(options.page), papers))
    if options.json:
        numbers = {paper.name: {"paper": paper.cited, "panels": drawn(paper)} for paper in papers}
        write_text(options.json, json.dumps(numbers, indent=1) + "\n")
    sys.stdout.write(summary(papers))


if __name__ == "__main__":
    main()
