"""Linear and mixed-integer programs, solved by HiGHS: the one place that knows the solver.

A program is a list of columns and of rows ``lower <= sum(coefficient * column) <= upper``; the
objective is to be as small as possible.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import highspy
import numpy as np
from numpy.typing import NDArray

INFINITY = math.inf

Terms = dict[int, float]
"""Column to coefficient."""

TOLERANCE = 1e-9
"""Absolute, by which a solution may exceed a row: programs are written in units near 1."""


_ATTEMPTS = {
    True: (("choose", TOLERANCE), ("off", TOLERANCE), ("off", 1e-7)),
    False: (("off", TOLERANCE), ("choose", TOLERANCE), ("off", 1e-7)),
}
"""By whether presolve comes first. HiGHS reports a solve error when its own check of a solution
fails; it then solves the other way, and at last with its usual tolerance."""


def _solver(presolve: str, tolerance: float) -> highspy.Highs:
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("presolve", presolve)
    solver.setOptionValue("mip_heuristic_run_feasibility_jump", False)  # longer than the rest
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.setOptionValue("mip_abs_gap", 0.0)
    for name in ("primal_feasibility", "dual_feasibility", "mip_feasibility"):
        solver.setOptionValue(f"{name}_tolerance", tolerance)
    return solver


@dataclass(frozen=True, slots=True)
class Solution:
    """The optimum.

    Attributes
    ----------
    objective
        Its value.
    values
        float64 ``(columns,)``.
    """

    objective: float
    values: NDArray[np.float64]


@dataclass(slots=True)
class Program:
    """Columns and rows, added by name; names are for reading only."""

    names: list[str] = field(default_factory=list)
    row_names: list[str] = field(default_factory=list)
    _cost: list[float] = field(default_factory=list)
    _low: list[float] = field(default_factory=list)
    _high: list[float] = field(default_factory=list)
    _whole: list[bool] = field(default_factory=list)
    _start: list[int] = field(default_factory=lambda: [0])
    _index: list[int] = field(default_factory=list)
    _value: list[float] = field(default_factory=list)
    _row_low: list[float] = field(default_factory=list)
    _row_high: list[float] = field(default_factory=list)

    def column(
        self,
        name: str,
        *,
        low: float = 0.0,
        high: float = INFINITY,
        cost: float = 0.0,
        whole: bool = False,
    ) -> int:
        """A new column; returns its index."""
        self.names.append(name)
        self._cost.append(cost)
        self._low.append(low)
        self._high.append(high)
        self._whole.append(whole)
        return len(self.names) - 1

    def row(
        self,
        name: str,
        terms: Mapping[int, float],
        *,
        low: float = -INFINITY,
        high: float = INFINITY,
    ) -> int:
        """A new row; returns its index."""
        for index, value in terms.items():
            if value != 0.0:
                self._index.append(index)
                self._value.append(value)
        self._start.append(len(self._index))
        self.row_names.append(name)
        self._row_low.append(low)
        self._row_high.append(high)
        return len(self.row_names) - 1

    def solve(self, *, presolve: bool | None = None) -> Solution | None:
        """The optimum, or None where no point keeps all rows.

        Parameters
        ----------
        presolve
            Whether HiGHS simplifies the program first; by default only where no column is whole:
            of a few hundred whole columns that may take longer than the solution.

        Raises
        ------
        RuntimeError
            HiGHS gives up or finds the program unbounded: a mistake in the program.
        """
        model = self._model()
        first = not any(self._whole) if presolve is None else presolve
        for how, tolerance in _ATTEMPTS[first]:
            solver = _solver(how, tolerance)
            solver.passModel(model)
            solver.run()
            status = solver.getModelStatus()
            if status != highspy.HighsModelStatus.kSolveError:
                break
        if status in (
            highspy.HighsModelStatus.kInfeasible,
            highspy.HighsModelStatus.kUnboundedOrInfeasible,
        ):
            return None
        if status != highspy.HighsModelStatus.kOptimal:
            raise RuntimeError(f"HiGHS stopped with {solver.modelStatusToString(status)}")
        found = solver.getSolution()
        return Solution(
            float(solver.getInfo().objective_function_value),
            np.asarray(found.col_value, dtype=np.float64),
        )

    def _model(self) -> highspy.HighsLp:
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self.names), len(self.row_names)
        model.col_cost_ = np.asarray(self._cost)
        model.col_lower_, model.col_upper_ = np.asarray(self._low), np.asarray(self._high)
        model.row_lower_ = np.asarray(self._row_low)
        model.row_upper_ = np.asarray(self._row_high)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.asarray(self._start, dtype=np.int32)
        model.a_matrix_.index_ = np.asarray(self._index, dtype=np.int32)
        model.a_matrix_.value_ = np.asarray(self._value)
        if any(self._whole):
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            model.integrality_ = [kinds[each] for each in self._whole]
        return model
