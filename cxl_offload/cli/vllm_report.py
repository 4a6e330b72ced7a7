"""``cxl-offload vllm-report``: hit rate, bytes per tier and tokens/s of a running vLLM."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cxl_offload.cli._options import AsJson
from cxl_offload.cli._report_table import NONE, console_of, show, table
from cxl_offload.cli._run_report import write_json
from cxl_offload.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from cxl_offload.integrations.vllm.serving_report import ServingReport

_LONGEST_S = 7 * 24 * 3600.0
"""A week; a server is seldom up for longer, and no clock waits for infinity."""


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("vllm-report")(vllm_report)


def vllm_report(
    server: Annotated[str, typer.Argument(help="Its address, such as http://127.0.0.1:8000.")],
    seconds: Annotated[
        float | None,
        typer.Option(min=0.1, max=_LONGEST_S, help="Watch so long; default: since it started."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What a running `vllm serve` says of its KV cache.

    Example: cxl-offload vllm-report http://127.0.0.1:8000 --seconds 60
    """
    from cxl_offload.integrations.vllm.serving_report import read_metrics, serving_report

    begin = read_metrics(server)
    end = begin
    if seconds is not None:
        time.sleep(seconds)
        end = read_metrics(server)
    report = serving_report(end, None if seconds is None else begin)
    if as_json:
        found = asdict(report) | {"hit_rate": report.hit_rate, "tier_bytes": report.tier_bytes}
        plain = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in found.items()
        }
        write_json("-", plain)
        return
    _print(console_of(), report, seconds)


def _print(console: Console, report: ServingReport, seconds: float | None) -> None:
    since = "since it started, idle times included" if seconds is None else f"in {seconds:g} s"
    made = table(f"Served {since}", "what", "value", right=("value",))
    waited = report.first_token_s
    made.add_row("requests", f"{report.requests:.0f}")
    made.add_row("tokens of prompts", f"{report.prompt_tokens:.0f}")
    made.add_row("hit rate", f"{report.hit_rate:.1%}")
    made.add_row("- served by the tiers", f"{report.host_hit_rate:.1%}")
    made.add_row("generated tokens/s", f"{report.generated_per_s:.1f}")
    made.add_row("first token, mean", NONE if math.isnan(waited) else format_seconds(waited))
    made.add_row("stored to the tiers", format_bytes(report.stored_bytes))
    made.add_row("loaded from the tiers", format_bytes(report.loaded_bytes))
    show(console, made)
    if not report.tiers:
        console.print("No counters of tiers: this server does not offload KV by cxl_offload.")
        return
    events = sorted({event for events in report.tiers.values() for event in events})
    tiers = table("Bytes of every tier", "tier", *events, right=tuple(events))
    for tier, counts in report.tier_bytes.items():
        tiers.add_row(tier, *(format_bytes(counts.get(event, 0)) for event in events))
    show(console, tiers)
