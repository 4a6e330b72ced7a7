"""A picture of predictions against published values; needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cxl_offload.files import save_figure
from cxl_offload.validation.report import Result

_MARKERS = {"predict": "o", "semantics": "x", "property": "s"}
_BAND = 0.10


def _points(result: Result) -> Iterator[tuple[float, float]]:
    """``(published, predicted)`` of a case with values; bounds and booleans have none."""
    expected = result.case.expected
    if expected is None or expected.op in ("range", "at_most", "at_least"):
        return
    values = expected.value if isinstance(expected.value, list) else [expected.value]
    predicted = result.predicted if isinstance(result.predicted, list) else [result.predicted]
    for value, number in zip(values, predicted, strict=False):
        numbers = (value, number)
        if all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
            yield float(value), float(number)  # type: ignore[arg-type]


def _scatter(axes: Any, results: Sequence[Result]) -> None:
    """Every published number against its prediction, on logarithmic axes."""
    for use, marker in _MARKERS.items():
        pairs = [
            pair
            for result in results
            if result.case.use == use
            for pair in _points(result)
            if min(pair) > 0
        ]
        if pairs:
            published, predicted = zip(*pairs, strict=True)
            axes.scatter(published, predicted, marker=marker, s=24, alpha=0.7, label=use)
    low, high = axes.get_xlim() if axes.has_data() else (0.1, 10.0)
    line = (max(low, 1e-2), max(high, 1.0))
    axes.plot(line, line, color="grey", linewidth=0.8, label="equal")
    for factor in (1 - _BAND, 1 + _BAND):
        axes.plot(line, [end * factor for end in line], color="grey", linewidth=0.5, linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="published", ylabel="predicted")
    axes.set_title(f"predicted vs published (dotted: ±{_BAND:.0%})")
    axes.legend()


def _ratios(axes: Any, results: Sequence[Result]) -> None:
    """Predicted over published of the cases marked ``predict``, a line a model."""
    ratios = [
        (result.case.model, predicted / published)
        for result in results
        if result.case.use == "predict"
        for published, predicted in _points(result)
        if published
    ]
    names = sorted({model for model, _ in ratios})
    axes.axvline(1.0, color="grey", linewidth=0.8)
    for model, ratio in ratios:
        axes.scatter(ratio, names.index(model), color="tab:blue", s=24, alpha=0.6)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="predicted / published")
    axes.set_title("cases marked predict, by model")
    axes.grid(axis="x", alpha=0.3)


def plot_results(results: Sequence[Result], file: Path) -> None:
    """Writes a scatter plot, predicted vs published, with the ratios by model beside it.

    Only values above 0 fit the logarithmic axes of the left panel; the right one has the cases
    marked ``predict``, whose numbers were measured or printed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5.5), width_ratios=(1, 1.2))
    _scatter(left, results)
    _ratios(right, results)
    figure.tight_layout()
    save_figure(figure, file, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
