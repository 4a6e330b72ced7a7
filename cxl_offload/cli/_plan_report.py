"""A plan as tables, for people."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from cxl_offload.cli._outputs import write_all
from cxl_offload.cli._report_table import NONE, console_of, show, table
from cxl_offload.files import encode
from cxl_offload.plan.headline import copies_in_words, seen_by_requests, speed, waits
from cxl_offload.plan.plan_file import OWN_FILE, save_plan
from cxl_offload.units import format_bytes, format_number, format_seconds

if TYPE_CHECKING:
    from cxl_offload.plan.plan_file import Plan


def deliver(
    plan: Plan,
    output: Path | None,
    as_json: bool,
    write_report: Callable[[], None] | None = None,
    *,
    file: Path | None = None,
) -> None:
    """Writes a plan and what else is asked for, then prints it: whoever reads may stop early.

    Parameters
    ----------
    output
        Where the plan is written; None where it is not.
    write_report
        Writes the page.
    file
        Where the plan was read.
    """
    written = ""

    def write_plan() -> None:
        nonlocal written
        if output is not None:
            save_plan(plan, output)
            written = f"written: {output}"

    def show_it() -> None:
        if as_json:
            print(json.dumps(encode(plan), indent=1, allow_nan=False))
            return
        shown = output or file
        print_plan(console_of(), plan, None if shown is None else str(shown))
        if written:
            print(f"\n{written}")

    write_all(write_plan, *([] if write_report is None else [write_report]), show_it)


def print_plan(console: Console, plan: Plan, file: str | None = None) -> None:
    """The tables of a plan, and the command that runs it from its file."""
    batch = plan.batch
    status = "runs there" if plan.runs else f"advice only: {plan.advice}"
    console.print(f"{plan.model} on {plan.machine} with {plan.executor} ({status})")
    prompt = f"{batch.prompt} + " if batch.prompt else ""
    console.print(
        f"batch {batch.size} x {batch.count}, {prompt}{batch.tokens} tokens; {speed(plan)}"
    )
    for said in waits(plan):
        console.print(f"{said}.")
    if plan.serving is not None:
        console.print(f"{seen_by_requests(plan.serving)}.")
    cxl = "used" if plan.cxl.used else "left alone"
    gain = "" if plan.cxl.gain is None else f" ({plan.cxl.gain:+.1%} predicted)"
    console.print(f"CXL memory: {cxl}{gain}; {plan.cxl.reason}.")
    if plan.copies is not None:
        console.print(f"Copies of weights: {copies_in_words(plan.copies)}.")
    _print_homes(console, plan)
    _print_phases(console, plan)
    _print_prices(console, plan)
    if plan.why:
        console.print("\nWhy so (predicted)")
        for reason in plan.why:
            console.print(f"- {reason}.")
    console.print()
    if plan.error is not None:
        console.print(
            f"Predicted error: median {plan.error.median:.1%}, worst {plan.error.worst:.1%} of "
            f"{plan.error.cases} cases; {plan.error.source}."
        )
    for note in plan.notes:
        console.print(f"Note: {note}.")
    for name, text in plan.settings.items():
        console.print(f"\n{name}\n{text}")
    if plan.runs:  # else it would be refused
        _print_command(console, plan, file)


def _print_command(console: Console, plan: Plan, file: str | None) -> None:
    """How to run the plan, and the files that this takes."""
    reader = "`cxl-offload run`" if plan.executor == "deepspeed" else "The command"
    if file is None and (plan.executor == "deepspeed" or plan.command_in("") != plan.command):
        console.print(f"\n{reader} reads the plan: write it with --output {OWN_FILE}.")
    for said in _to_bring(plan):
        console.print(f"\n{said}")
    if plan.command:
        print(f"\n{shlex.join(plan.command_in(file or OWN_FILE))}")


def _to_bring(plan: Plan) -> Iterator[str]:
    """Files and folders of the command that only the user has, and where they come from."""
    words = dict(pairwise(plan.command))
    if machine := words.get("--machine"):
        yield f"On {machine} itself leave --machine out: it puts everything on simulated nodes."
    if name := words.get("--prompts"):
        most = plan.batch.size * plan.batch.count
        yield f"{name} is a file of yours: one prompt a line, at most {most}.{_for_fewer(plan)}"
    model = words.get("serve" if plan.executor == "vllm" else "--model")
    if model is not None and not os.path.exists(model):
        folder = words.get("--path", "~/opt_weights")
        yield f"{model} {_FOLDERS[plan.executor].format(folder=folder, model=model)}"
    if plan.executor == "deepspeed":
        scripts = (word for word in plan.command if word.endswith(".py"))
        for script in scripts:
            yield (
                f"{script} is your training script (--script names another one). `cxl-offload run` "
                f"with the plan's file writes {' and '.join(plan.settings)}, and runs the command."
            )


def _for_fewer(plan: Plan) -> str:
    """How to plan for fewer prompts, where the option that bounds batches can."""
    on_cpus = plan.executor == "transformers" and plan.accelerator is None
    can = plan.batch.count > 1 or (on_cpus and plan.batch.size > 1)
    return " To plan for fewer, give --max-batches." if can else ""


_CHECKPOINT = "its config.json and *.safetensors, as save_pretrained() or a download writes them"
_SIZES_ONLY = (
    "is a name whose sizes the planner knows, and the command needs the weights: name your"
)

_FOLDERS = {
    "flexgen": "is a name whose weights the command looks for in {folder}/{model}-np; nothing is "
    "downloaded. --path names another folder, or --model that of a checkpoint: "
    f"{_CHECKPOINT}.",
    "transformers": f"{_SIZES_ONLY} folder of them after --model, with {_CHECKPOINT}.",
    "vllm": f"{_SIZES_ONLY} folder of them after serve, with {_CHECKPOINT}; or their name on the "
    "Hugging Face hub.",
}
"""Where the model of a command comes from, where it is no folder here."""


def _kept_as(plan: Plan, kind: str) -> str:
    """What a kind is kept in, where that is not what is computed in."""
    dtype = {"kv": plan.kv_dtype, "exp_avg": plan.state_dtype, "exp_avg_sq": plan.state_dtype}
    return f" ({dtype[kind]})" if dtype.get(kind) else ""


def _print_homes(console: Console, plan: Plan) -> None:
    made = table("Placement", "kind", "where", "bytes", "share", "policy", right=("bytes", "share"))
    for home in plan.homes:
        share = f"{home.percent:.1f} %"
        kept_as = _kept_as(plan, home.kind)
        made.add_row(
            home.kind + kept_as, home.where, format_bytes(home.bytes), share, home.policy or NONE
        )
    for node, nbytes in plan.node_bytes.items():
        made.add_row("all", f"node {node}", format_bytes(nbytes), NONE, NONE)
    if plan.gpu_bytes:
        made.add_row("all", "GPU, with work buffers", format_bytes(plan.gpu_bytes), NONE, NONE)
    if plan.drive_bytes:
        made.add_row("all", "drive", format_bytes(plan.drive_bytes), NONE, NONE)
    for node, threads in plan.threads.items():
        made.add_row("threads", f"node {node}", f"{threads} threads", NONE, NONE)
    show(console, made)


def _print_phases(console: Console, plan: Plan) -> None:
    made = table("Time (predicted)", "phase", "time", "bottleneck", "terms", right=("time",))
    for phase in plan.phases:
        terms = "\n".join(
            f"{name}: {format_seconds(seconds)}"
            for name, seconds in phase.terms.items()
            if format_seconds(seconds) != format_seconds(0)
        )
        made.add_row(phase.name, format_seconds(phase.seconds), phase.bottleneck, terms or NONE)
    show(console, made)


def _print_prices(console: Console, plan: Plan) -> None:
    title = "Gain from one more GiB or GB/s, at least (predicted, each planned again)"
    made = table(title, "resource", "unit", "tokens/s", right=("tokens/s",))
    for price in plan.prices:
        if price.brings_something:
            made.add_row(
                price.what, f"1 {price.unit}", f"+{format_number(price.gain_tokens_per_s)}"
            )
    show(console, made)
    if idle := plan.idle_resources():
        console.print(f"\n{idle}")
