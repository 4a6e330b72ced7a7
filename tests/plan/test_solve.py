"""The solver's seam: optima, infeasible programs, and what it refuses to hide."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

from cxl_offload.plan.solve import Program


def knapsack() -> Program:
    program = Program()
    columns = [
        program.column(name, high=1.0, cost=-value, whole=True)
        for name, value in (("a", 6.0), ("b", 5.0), ("c", 4.0))
    ]
    program.row("room", dict(zip(columns, (5.0, 4.0, 3.0), strict=True)), high=7.0)
    return program


def test_whole_optimum_is_that_of_all_subsets() -> None:
    program = knapsack()
    best = min(
        -(6 * a + 5 * b + 4 * c)
        for a, b, c in itertools.product((0, 1), repeat=3)
        if 5 * a + 4 * b + 3 * c <= 7
    )

    found = program.solve()

    assert found is not None
    assert found.objective == pytest.approx(best)
    assert list(np.round(found.values)) == [0, 1, 1]


FIRST_SOLUTION = """
from cxl_offload.plan.solve import Program

program = Program()
program.column("x", high=1.0, cost=-1.0)
assert program.solve().objective == -1.0
"""


def test_first_solver_of_a_process_prints_nothing() -> None:
    """What it prints stands in front of the planner's JSON."""
    done = subprocess.run([sys.executable, "-c", FIRST_SOLUTION], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")


def test_infeasible_is_none_and_unbounded_is_an_error() -> None:
    nothing = Program()
    nothing.row("impossible", {nothing.column("x", high=1.0): 1.0}, low=2.0)
    endless = Program()
    endless.column("x", cost=-1.0)

    assert nothing.solve() is None
    with pytest.raises(RuntimeError, match="HiGHS stopped with"):
        endless.solve()
