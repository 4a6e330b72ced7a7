"""``cxl-offload tco``: whether servers with CXL memory cost less than more servers without."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from cxl_offload.cli._options import AsJson
from cxl_offload.cli._report_table import console_of, show, table
from cxl_offload.cli._run_report import write_json
from cxl_offload.errors import ConfigError
from cxl_offload.plan.equations import tco


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("tco")(tco_command)


@dataclass(frozen=True, slots=True)
class _Fleet:
    """What the optional numbers say; None where they are not given."""

    n_baseline: float | None
    server_cost: float | None
    d: float | None
    w: float | None


# Long, with many parameters: a line for each option of the command line and field of the request.
def tco_command(
    r_t: Annotated[float, typer.Option(help="Cost of a server with CXL over one without.")],
    without: Annotated[
        Path | None,
        typer.Option(help="A plan.yaml without CXL, in place of ratios."),
    ] = None,
    having: Annotated[Path | None, typer.Option(help="The same model's plan with CXL.")] = None,
    rl_d: Annotated[
        float | None, typer.Option(help="Latency of main memory relative to SSD.")
    ] = None,
    rl_c: Annotated[
        float | None, typer.Option(help="Latency of CXL memory relative to SSD.")
    ] = None,
    c: Annotated[
        float | None, typer.Option("--c", help="Main memory over CXL memory of a server.")
    ] = None,
    n_threads: Annotated[float | None, typer.Option(help="Threads on CXL memory.")] = None,
    n_congest: Annotated[float | None, typer.Option(help="Threads that congest it.")] = None,
    n_baseline: Annotated[float | None, typer.Option(help="Servers without CXL.")] = None,
    server_cost: Annotated[float | None, typer.Option(help="Cost of one of them.")] = None,
    d: Annotated[float | None, typer.Option("--d", help="Main memory of a server (unit).")] = None,
    w: Annotated[float | None, typer.Option("--w", help="Working set (same unit).")] = None,
    as_json: AsJson = False,
) -> None:
    """Servers, cost and break-even with CXL memory, by the published formula and corrected.

    The printed form (needs --n-threads and --n-congest) is the paper's; the corrected ones use a
    CXL capacity of D/C, and let congestion lengthen the CXL time or leave it out. With two plans
    (--without, --having) the ratio of servers is that of their tokens/s. Example: cxl-offload tco
    --rl-d 0.1 --rl-c 0.125 --c 2 --r-t 1.1
    """
    _check_above_zero(r_t=r_t, n_baseline=n_baseline, server_cost=server_cost, d=d, w=w)
    _check_together(without=without, having=having)
    if server_cost is not None and n_baseline is None:
        raise ConfigError("--server-cost: the cost of no number of servers; give --n-baseline too")
    fleet = _Fleet(n_baseline, server_cost, d, w)
    if without is not None and having is not None:
        _check_no_ratios(
            rl_d=rl_d, rl_c=rl_c, c=c, n_threads=n_threads, n_congest=n_congest, d=d, w=w
        )
        _show_found({"planned": _planned(without, having, r_t, fleet)}, as_json)
        return
    if rl_d is None or rl_c is None or c is None:
        raise ConfigError("tco: give --rl-d, --rl-c and --c, or two plans (--without, --having)")
    _check_together(n_threads=n_threads, n_congest=n_congest)
    if d is not None or w is not None:  # of times, which are those of so many servers
        _check_together(d=d, w=w, n_baseline=n_baseline)
    forms: list[tuple[str, tco.TcoForm, tco.Congestion]] = [("corrected", "corrected", "none")]
    if n_threads is not None and n_congest is not None:
        forms.insert(0, ("printed", "printed", "none"))
        forms.append(("corrected, congestion", "corrected", "multiply"))
    found = {
        name: _evaluate(
            tco.TcoInputs(rl_d, rl_c, c, r_t, form, n_congest, n_threads, congestion), fleet
        )
        for name, form, congestion in forms
    }
    _show_found(found, as_json)


def _check_above_zero(**given: float | None) -> None:
    """Refuses options, by their names in Python, that are given and no numbers above 0."""
    for name, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{_flag(name)} {value:g}: a number above 0")


def _check_together(**options: object) -> None:
    """Refuses options, by their names in Python, of which some are given and others are not."""
    given = [_flag(name) for name, value in options.items() if value is not None]
    missing = [_flag(name) for name, value in options.items() if value is None]
    if given and missing:
        raise ConfigError(
            f"{given[0]}: does nothing without {' and '.join(missing)}; give "
            f"{'both' if len(options) == 2 else 'all'}, or leave it out"
        )


def _check_no_ratios(**options: float | None) -> None:
    """Refuses what the formula takes, by names in Python, beside two plans that say the ratio."""
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"{_flag(name)} {value:g}: two plans say the ratio; leave it out")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _show_found(found: dict[str, dict[str, object]], as_json: bool) -> None:
    for name, value in (pair for figures in found.values() for pair in figures.items()):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"tco: {_FIGURES[name]}: no number is so large; give smaller ones")
    if as_json:
        write_json("-", found)
        return
    _print(found)


def _planned(without: Path, having: Path, r_t: float, fleet: _Fleet) -> dict[str, object]:
    """Figures of servers that make the same tokens/s, as two plans predict them."""
    from cxl_offload.plan.plan_file import load_plan

    plans = [load_plan(without), load_plan(having)]
    if plans[0].model != plans[1].model or plans[0].batch.prompt != plans[1].batch.prompt:
        raise ConfigError(f"tco: {without} and {having} are not plans of the same work")
    ratio = plans[0].tokens_per_s / plans[1].tokens_per_s
    figures: dict[str, object] = {
        "servers_ratio": ratio,
        "saving": 1 - r_t * ratio,
        "break_even_server_cost": 1 / ratio,
    }
    baseline, cost = fleet.n_baseline, fleet.server_cost
    if baseline is not None:
        figures |= {"servers_baseline": baseline, "servers_cxl": baseline * ratio}
        if cost is not None:
            figures |= {"cost_baseline": baseline * cost, "cost_cxl": baseline * ratio * cost * r_t}
    used = plans[1].cxl.used
    reason = f"{having} uses no CXL memory: {plans[1].cxl.reason}"
    figures["warnings"] = [] if used else [reason]
    return figures


def _evaluate(inputs: tco.TcoInputs, fleet: _Fleet) -> dict[str, object]:
    """Every figure that the given numbers allow, by name."""
    tco.check(inputs, d=fleet.d, w=fleet.w, n_baseline=fleet.n_baseline or 0.0)
    figures: dict[str, object] = {
        "servers_ratio": tco.server_ratio(inputs),
        "saving": tco.saving(inputs),
        "break_even_server_cost": tco.break_even_server_cost(inputs),
    }
    baseline = fleet.n_baseline
    if baseline is not None:
        cost = tco.cost_of_servers(
            inputs, n_baseline=baseline, server_cost=fleet.server_cost or 0.0
        )
        figures |= {"servers_baseline": cost.n_baseline, "servers_cxl": cost.n_cxl}
        if fleet.server_cost is not None:
            figures |= {"cost_baseline": cost.baseline_cost, "cost_cxl": cost.cxl_cost}
        if fleet.d is not None and fleet.w is not None:
            times = tco.times(inputs, d=fleet.d, w=fleet.w, n_baseline=baseline)
            figures |= {"time_baseline": times[0], "time_cxl": times[1]}
    figures["warnings"] = list(
        tco.warnings(inputs, d=fleet.d, w=fleet.w, n_baseline=baseline or 0.0)
    )
    return figures


_FIGURES = {
    "servers_ratio": "servers with CXL, of those without",
    "saving": "saving, of the cost without CXL",
    "break_even_server_cost": "break-even cost of a server with CXL (one without = 1)",
    "servers_baseline": "servers without CXL",
    "servers_cxl": "servers with CXL",
    "cost_baseline": "cost without CXL (currency of --server-cost)",
    "cost_cxl": "cost with CXL (the same)",
    "time_baseline": "time without CXL (SSD time of one unit of --w = 1)",
    "time_cxl": "time with CXL (the same)",
}
"""Figures with their units."""


def _print(found: dict[str, dict[str, object]]) -> None:
    made = table("Cost of ownership with CXL memory", "", *found, right=found)
    for figure in next(iter(found.values())):
        if figure != "warnings":
            made.add_row(
                _FIGURES[figure], *(_shown(figure, each[figure]) for each in found.values())
            )
    console = console_of()
    show(console, made)
    for name, each in found.items():
        for warning in each["warnings"]:  # type: ignore[attr-defined]
            console.print(f"{name}: {warning}", style="yellow")


def _shown(figure: str, value: object) -> str:
    return f"{value:.2%}" if figure in ("servers_ratio", "saving") else f"{value:,.4g}"
