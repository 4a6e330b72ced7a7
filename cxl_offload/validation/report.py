"""Predicts the cases of a file and counts what passes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cxl_offload.validation import bandwidth, copies_models, inference, plans, rules, training
from cxl_offload.validation.answers import Answer, PublicModel
from cxl_offload.validation.casefile import Case, Expectation
from cxl_offload.validation.inputs import Inputs, known_keys
from cxl_offload.validation.scoring import Predicted, score

MODELS: dict[str, PublicModel] = {
    model.name: model
    for model in (
        *inference.MODELS,
        *training.MODELS,
        *copies_models.MODELS,
        *bandwidth.MODELS,
        *plans.MODELS,
        *rules.MODELS,
    )
}
"""The public models by name."""


@dataclass(frozen=True, slots=True)
class Result:
    """A case, what was predicted (None: not answered) and how it compares."""

    case: Case
    predicted: Predicted | None
    error: float | None
    passes: bool
    note: str

    def as_json(self) -> dict[str, object]:
        """The entry of ``validate --json``."""
        return {
            "id": self.case.id,
            "predicted": self.predicted,
            "expected": _plain(self.case.expected),
            "error": self.error,
            "pass": self.passes,
            "group": self.case.group,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class PassRate:
    """How many cases of a kind there are and how many pass."""

    name: str
    cases: int
    passed: int

    @property
    def share(self) -> float:
        """Share of the cases that pass."""
        return self.passed / self.cases


def _plain(expected: Expectation | None) -> object:
    if expected is None:
        return None
    if expected.op == "range":
        return {"min": expected.low, "max": expected.high}
    if expected.op in ("at_most", "at_least"):
        return {expected.op: expected.value}
    return expected.value


def predict(model: str, inputs: dict[str, object]) -> Answer:
    """The answer of one public model.

    Raises
    ------
    ValueError
        Unknown model, unknown or missing key, a number out of its range, no finite answer.
    """
    if model not in MODELS:
        raise ValueError(f"no model is called {model!r}; known: {', '.join(sorted(MODELS))}")
    public = MODELS[model]
    known_keys(f"inputs of {model}", inputs, ("system", *public.keys))
    answer = public.answer(Inputs(inputs))
    values = answer.value if isinstance(answer.value, list) else [answer.value]
    if not all(math.isfinite(value) for value in values):
        raise ValueError(f"{model} answers {answer.value}, which is no number")
    return answer


def _result(case: Case) -> Result:
    if case.wrong or case.expected is None:
        return Result(case, None, None, False, f"line {case.line}: {case.wrong}")
    try:
        answer = predict(case.model, dict(case.inputs))
    except (ValueError, ArithmeticError, LookupError) as error:
        reason = str(error) or type(error).__name__
        return Result(case, None, None, False, f"line {case.line}: not answered: {reason}")
    passes, error_size = score(answer.value, case.expected)
    return Result(case, answer.value, error_size, passes, "; ".join(answer.notes))


def validate(cases: Iterable[Case]) -> list[Result]:
    """Predicts every case; one that cannot be answered fails, with the reason in its note."""
    return [_result(case) for case in cases]


@dataclass(frozen=True, slots=True)
class Absolute:
    """How far plans are from published absolute results.

    Attributes
    ----------
    cases
        How many there are; ``unanswered`` of them have no prediction and are in no other number.
    median
        Of what the larger of prediction and published value is over the smaller, less 1.
    worst
        The largest of these ratios, of the case ``worst_id``.
    beyond
        How many ratios are above ``FAR``.
    """

    cases: int
    unanswered: int
    median: float
    worst: float
    worst_id: str
    beyond: int


FAR = 1.4
"""Ratio beyond which a prediction is called far off."""


def absolute_errors(results: Sequence[Result]) -> Absolute | None:
    """Over the cases of plans whose published value is a measurement; None: there are none."""
    asked = [each for each in results if _is_absolute(each.case)]
    ratios = [
        (_ratio(each.predicted, each.case.expected), each.case.id)
        for each in asked
        if each.predicted is not None and each.case.expected is not None
    ]
    if not ratios:
        return None
    worst, worst_id = max(ratios)
    return Absolute(
        cases=len(asked),
        unanswered=len(asked) - len(ratios),
        median=statistics.median(ratio for ratio, _ in ratios) - 1,
        worst=worst,
        worst_id=worst_id,
        beyond=sum(ratio > FAR for ratio, _ in ratios),
    )


def _is_absolute(case: Case) -> bool:
    is_plan = case.model == "plan" and case.inputs.get("metric") in plans.ABSOLUTE
    return is_plan and case.expected is not None and case.expected.op == "approx"


def _ratio(predicted: Predicted, expected: Expectation) -> float:
    number, value = float(predicted), float(expected.value)  # type: ignore[arg-type]
    return max(number / value, value / number) if number > 0 < value else math.inf


def pass_rates(results: Sequence[Result], key: Callable[[Result], str]) -> list[PassRate]:
    """Pass rates by ``key``, in the order of first appearance."""
    names = dict.fromkeys(key(result) for result in results)
    return [
        PassRate(
            name,
            sum(key(result) == name for result in results),
            sum(key(result) == name and result.passes for result in results),
        )
        for name in names
    ]
