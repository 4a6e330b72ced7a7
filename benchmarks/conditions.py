"""What benchmarks against stock are asked alike: at which sizes, and beside a neighbour too or not.

A sample is taken alone (``QUIET``), and where ``--neighbour`` asks for it also ``BESIDE`` a process
that keeps a CPU and the memory busy (neighbour.py), in every round once.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks import grid
from benchmarks.neighbour import BESIDE, QUIET, Falls, Neighbour, falls_document


def add_options(parser: argparse.ArgumentParser) -> None:
    """``--grid`` and ``--neighbour``, which are the same in every benchmark that has them."""
    told = " and ".join(", ".join(map(str, each)) for each in (grid.ROWS, grid.LENGTHS))
    parser.add_argument("--grid", action="store_true", help=f"rows and tokens: {told}")
    parser.add_argument(
        "--neighbour",
        action="store_true",
        help="every case also beside a process that keeps a CPU and the memory busy",
    )


class Conditions:
    """Under which the samples of every round are taken.

    Parameters
    ----------
    neighbour
        The process of ``BESIDE``; without one, all samples are ``QUIET``.
    """

    def __init__(self, neighbour: Neighbour | None = None) -> None:
        self._neighbour = neighbour
        self.names = (QUIET,) if neighbour is None else (QUIET, BESIDE)

    def of_round(self, number: int) -> Iterator[str]:
        """Each, while it holds: quiet first in every other round, so that drift hits both."""
        for name in reversed(self.names) if number % 2 else self.names:
            with self._neighbour.during(name) if self._neighbour else contextlib.nullcontext():
                yield name

    def document(self, falls: Callable[[], Mapping[str, Falls]]) -> dict[str, Any]:
        """What the neighbour did and cost, for the JSON of a benchmark; nothing without one."""
        if self._neighbour is None:
            return {}
        return {"neighbour": falls_document(self._neighbour, falls())}


@contextlib.contextmanager
def conditions_of(options: argparse.Namespace) -> Iterator[Conditions]:
    """Those that were asked for; a neighbour lives until the end of the block."""
    if not options.neighbour:
        yield Conditions()
        return
    with Neighbour() as neighbour:
        yield Conditions(neighbour)
