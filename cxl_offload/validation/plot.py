"""A picture of predictions against published values; needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cxl_offload.files import save_figure
from cxl_offload.validation.report import Result

_GOOD, _BAD = "tab:blue", "tab:red"


def shares_of_allowed(result: Result) -> Iterator[float]:
    """The error of every number of a case, as a share of what the case allows; it has a sign.

    Cases that allow nothing (equalities) and bounds have none.
    """
    expected = result.case.expected
    if expected is None or expected.op not in ("approx", "vector_approx"):
        return
    values = expected.value if isinstance(expected.value, list) else [expected.value]
    predicted = result.predicted if isinstance(result.predicted, list) else [result.predicted]
    allowed = expected.tolerance or {}
    for value, number in zip(values, predicted, strict=False):
        numbers = (value, number)
        if not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
            continue
        published, answer = float(value), float(number)  # type: ignore[arg-type]
        if "factor" in allowed:
            if published * answer > 0 and allowed["factor"] != 1:
                yield math.log(answer / published) / abs(math.log(allowed["factor"]))
            continue
        widest = max(allowed.get("rel", 0.0) * abs(published), allowed.get("abs", 0.0))
        if widest:
            yield (answer - published) / widest


def _draw(axes: Any, results: Sequence[Result]) -> None:
    """A line a model, a dot a number; within the band it passes."""
    names = sorted({result.case.model for result in results}, reverse=True)
    cases = {name: [each for each in results if each.case.model == name] for name in names}
    axes.axvspan(-1, 1, color="tab:green", alpha=0.08)
    axes.axvline(0, color="grey", linewidth=0.8)
    for line, name in enumerate(names):
        shares = [share for result in cases[name] for share in shares_of_allowed(result)]
        colors = [_GOOD if abs(share) <= 1 + 1e-9 else _BAD for share in shares]
        axes.scatter(shares, [line] * len(shares), color=colors, s=28, alpha=0.6, zorder=2)
    labels = [
        f"{name}  {sum(result.passes for result in cases[name])} of {len(cases[name])}"
        for name in names
    ]
    axes.set_yticks(range(len(names)), labels)
    axes.set_xlabel("predicted less published, as a share of what the case allows")
    axes.grid(axis="x", alpha=0.3)


def plot_results(results: Sequence[Result], file: Path) -> None:
    """Writes a picture of the errors of the cases marked ``predict``, a line a model.

    Their numbers were measured or printed. Beside each model stands how many of its cases pass;
    bounds and equalities count there and have no dot.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    predicted = [result for result in results if result.case.use == "predict"]
    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    _draw(axes, predicted)
    passed = sum(result.passes for result in predicted)
    axes.set_title(f"Predicted vs published: {passed} of {len(predicted)} cases pass (green band)")
    figure.tight_layout()
    save_figure(figure, file, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
