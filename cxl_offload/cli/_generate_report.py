"""What ``cxl-offload generate`` says beside what it measured: a replay, a plan, a whole page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cxl_offload.cli._report_file import write_run_page
from cxl_offload.errors import ConfigError

if TYPE_CHECKING:
    from cxl_offload.integrations.run_report import RunReport
    from cxl_offload.integrations.transformers import GenerateReport
    from cxl_offload.plan.plan_file import Plan
    from cxl_offload.sim import Timeline
    from cxl_offload.topology import Machine


def is_replayed(machine: Machine | None, accelerator: str | None) -> bool:
    """Whether a run says how long it would take on a simulated machine."""
    from cxl_offload.ranks import is_rank_of_job

    if machine is None or is_rank_of_job():
        return False
    return accelerator is None or bool(machine.gpus)


def replayed(report: GenerateReport, machine: Machine | None) -> Timeline | None:
    """What the run would take there; None where nobody asked, or its rates are not known."""
    if machine is None or not len(report.trace):
        return None
    from cxl_offload.plan.decoding.engine import TRANSFORMERS
    from cxl_offload.plan.decoding.trace import cpu_engines
    from cxl_offload.sim import replay

    try:
        return replay(report.trace, machine, engines=cpu_engines(machine, TRANSFORMERS))
    except ConfigError:
        return None


def beside_plan(
    report: RunReport, planned: Plan | None, *, model: str, on: str | None
) -> list[str]:
    """The speed of a run beside that of its plan, where it had one.

    Parameters
    ----------
    model
        The folder or name that the run was given.
    on
        The accelerator; None: CPUs computed.
    """
    from cxl_offload.plan.headline import WhatRan, beside_measured, sizes_of

    if planned is None:
        return []
    ran = WhatRan(
        rows=report.rows,
        prompt=report.prompt_len,
        generated=report.gen_len,
        model=report.model,
        shape=sizes_of(model),
        machine=report.machine,
        accelerator=on,
    )
    return [beside_measured(report.tokens_per_s, planned, ran)]


def write_page(
    file: Path,
    report: GenerateReport,
    machine: Machine,
    beside: Sequence[str],
    timeline: Timeline | None,
) -> None:
    """The page of ``--report``: the machine, where everything went, and how fast it was."""
    rates: dict[str, dict[str, float | None]] = {
        "whole run": {
            "measured": report.tokens_per_s,
            "predicted": report.predicted_tokens_per_s,
        },
        "prefill": {"measured": report.prefill_tokens_per_s},
        "decode": {"measured": report.decode_tokens_per_s},
    }
    for phase, rate in ({} if timeline is None else timeline.tokens_per_s).items():
        rates[phase]["simulated"] = rate
    title = f"generate: {report.model}"
    notes = report.placement_notes
    write_run_page(
        file, title, machine, report.placement, rates, timeline, notes=notes, about_speed=beside
    )
