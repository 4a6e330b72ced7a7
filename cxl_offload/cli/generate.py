"""``cxl-offload generate``: a decoder of transformers, its weights and KV cache in tiers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console

from cxl_offload.cli._generate_report import beside_plan, is_replayed, replayed, write_page
from cxl_offload.cli._observed import Events, Metrics, observed
from cxl_offload.cli._old_json import OldJsonCommand
from cxl_offload.cli._options import (
    AsJson,
    Limit,
    NamedTier,
    RunOutput,
    SimulatedMachine,
    Stop,
    Tune,
    TuneBudget,
    TuneState,
    Warmup,
)
from cxl_offload.cli._outputs import check_outputs, outputs, write_all
from cxl_offload.cli._progress import progress_bar
from cxl_offload.cli._report_file import ReportFile
from cxl_offload.cli._report_table import console_of, show
from cxl_offload.cli._run_report import (
    answer_lines,
    load_line,
    placement_table,
    simulated_table,
    speed_table,
    write_json,
)
from cxl_offload.errors import ConfigError
from cxl_offload.files.named_values import limits, pairs, size

if TYPE_CHECKING:
    from cxl_offload.integrations.fit import TierLimit
    from cxl_offload.integrations.transformers import Divided, GenerateReport, GenerateRun
    from cxl_offload.memory import Session
    from cxl_offload.sim import Timeline
    from cxl_offload.topology import Machine

_PERSIST_BYTES = "1GiB"


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("generate", cls=OldJsonCommand)(generate)


# Long, with many parameters: a line for each option of the command line and field of the request.
def generate(
    model: Annotated[
        str, typer.Option(help="Folder of a checkpoint as transformers saves it, or a GGUF file.")
    ],
    prompts: Annotated[str, typer.Option(help="A text file with one prompt a line.")],
    place: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=POLICY",
            help="Where kv, weights, or the attention, mlp, experts, norm, embedding, head and "
            "other weights go, e.g. kv=bind:cxl, weights=weighted:ldram=3,cxl=1 or "
            "weights=replicate:0,1 (a copy near each socket); may be repeated",
        ),
    ] = None,
    tier: NamedTier = None,
    limit: Limit = None,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A plan of `cxl-offload plan inference --executor transformers`: it decides every "
            "home, rows at once and the tokens; --place and what else is named goes before it.",
        ),
    ] = None,
    gen_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens to generate (default: the plan's, or 32).")
    ] = None,
    rows_at_once: Annotated[
        int | None,
        typer.Option(
            min=1, help="Prompts that a layer computes at once (default: the plan's, or all)."
        ),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="rows|tensors",
            help="What processes divide that torchrun started: rows (the default; every process "
            "has the whole model) or tensors (the weights and heads of every layer).",
        ),
    ] = None,
    machine: SimulatedMachine = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder with tokenizer files (default: the model's).")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and cache: auto, bfloat16, ...")] = "auto",
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="Of the cache: float8_e4m3fn, float8_e5m2 or int4 (default: the plan's, or that "
            "of the weights)."
        ),
    ] = None,
    whole_sequences: Annotated[
        bool,
        typer.Option(
            "--whole-sequences",
            help="Where kv is weighted or interleaved: every sequence on one node.",
        ),
    ] = False,
    persist: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Keep the KV of prompts' beginnings under this name (or on /dev/daxX.Y), so that "
            "the next run of this model computes only the rest; `cxl-offload kv` lists and drops "
            "it.",
        ),
    ] = None,
    persist_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Room for it (default: 1GiB).")
    ] = None,
    persist_folder: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where its file is (default: /dev/shm).")
    ] = None,
    attention: Annotated[
        str | None, typer.Option(help="Of prompts: eager or sdpa (default: the model's choice).")
    ] = None,
    accelerator: Annotated[
        str | None,
        typer.Option(
            metavar="cuda|cuda:N",
            help="Compute there, with weights that have a policy streamed to it layer by layer; "
            "KIND=gpu leaves a kind on it (default: what the plan says, else the CPU).",
        ),
    ] = None,
    accelerator_kv: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Share of every sequence's KV cache, its first positions, that lies on the "
            "accelerator, from 0 to 1; the rest lies where kv does, and the two are attended to "
            "at once (default: what the plan says, else none).",
        ),
    ] = None,
    cpu_linear: Annotated[
        str,
        typer.Option(
            metavar="torch|fastest",
            help="Who computes linear layers: PyTorch, or the faster of it and this package's "
            "kernel, which the first calls of every shape measure; as exact, but not the same in "
            "the last bit.",
        ),
    ] = "torch",
    tune: Tune = None,
    tune_budget: TuneBudget = "0B",
    tune_state: TuneState = None,
    stop: Stop = None,
    warmup: Warmup = False,
    answers: Annotated[bool, typer.Option(help="Print what was generated.")] = True,
    as_json: AsJson = False,
    output: RunOutput = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Write what the run read, copied and computed there, as events."
        ),
    ] = None,
    page: ReportFile = None,
    metrics: Metrics = None,
    events: Events = None,
) -> None:
    """Generate with transformers: weights and KV cache of any decoder in tiers.

    Example: cxl-offload generate --model my-opt --prompts prompts.txt --place kv=cxl
    """
    from cxl_offload.integrations.model_folder import check_checkpoint
    from cxl_offload.integrations.named_tiers import limits_on, named_tiers, with_tiers
    from cxl_offload.integrations.prompts import read_prompts
    from cxl_offload.integrations.transformers.kinds import check_kind
    from cxl_offload.plan.plan_file import load_plan
    from cxl_offload.topology import discover, load_machine

    # All of this before torch is loaded, which takes seconds.
    places = pairs("--place", place, str, form="KIND=POLICY, such as kv=cxl")
    for kind in places:
        check_kind(kind)
    written = {"--output": output, "--trace": trace, "--report": page, "--events": events}
    written["--tune-state"] = tune_state
    budget = size("--tune-budget", tune_budget)
    read = {"--model": model, "--prompts": prompts, "--plan": plan, "--machine": machine}
    read["--tokenizer"] = tokenizer
    check_outputs(written, read)
    planned = None if plan is None else load_plan(plan)
    check_checkpoint(model)
    texts = read_prompts(prompts)
    divided = _divided(ranks)
    if planned is None and not places:
        raise ConfigError(
            "--place: name at least one kind, such as kv=cxl, or kv=ldram where there is no CXL "
            "memory; or give --plan"
        )
    simulated = None if machine is None else load_machine(machine)
    tiers = named_tiers(tier or ())
    here = with_tiers(simulated or discover(), tiers)
    limits_on(here, tiers, limits(limit))
    try:
        from cxl_offload.integrations.transformers import GenerateRun, KeptPrefixes, RunTuning
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"generate: {error.name} is not installed; pip install transformers torch"
        ) from None
    except ImportError as error:  # said by a name of ours that loads it later
        raise ConfigError(f"generate: {error}") from None
    if persist is None and not (persist_bytes is None and persist_folder is None):
        raise ConfigError("--persist-bytes and --persist-folder do nothing without --persist")
    prefixes = None
    if persist is not None:
        prefixes = KeptPrefixes(
            bytes=_PERSIST_BYTES if persist_bytes is None else persist_bytes,
            persist=persist,
            persist_folder=persist_folder,
        )
    computes_on = accelerator or (None if planned is None else planned.accelerator)
    request = GenerateRun(
        model=model,
        prompts=texts,
        place=places,
        plan=planned,
        rows_at_once=rows_at_once,
        gen_len=gen_len or (32 if planned is None else planned.batch.tokens),
        tokenizer=tokenizer,
        dtype=dtype,
        kv_dtype=kv_dtype,
        whole_sequences=whole_sequences,
        prefixes=prefixes,
        attention=attention,
        accelerator=accelerator,
        accelerator_kv=accelerator_kv,
        cpu_linear=cpu_linear,  # type: ignore[arg-type]  # checked there
        record=trace is not None or (tune is None and is_replayed(simulated, computes_on)),
        stop=stop,
        warmup=warmup,
        tuning=RunTuning(
            signal=tune,  # type: ignore[arg-type]  # checked there
            budget_bytes=budget,
            state=tune_state,
        ),
    )
    watch = functools.partial(observed, metrics, events)
    report = _run(
        request, divided=divided, machine=simulated, tiers=tiers, limit=limits(limit), watch=watch
    )
    if report is None:
        return
    beside = beside_plan(report, planned, model=model, on=report.accelerator)
    beside += [f"Note: {each}" for each in report.speed_notes]
    timeline = replayed(report, simulated)
    writes: list[Callable[[], object]] = []
    if trace is not None:
        writes.append(lambda: report.trace.save(trace))
    if page is not None:
        writes.append(lambda: write_page(page, report, here, beside, timeline))
    simulation = None if timeline is None else timeline.to_json()
    document = {**report.to_json(), "simulated": simulation}
    writes += [functools.partial(write_json, file, document) for file in outputs(as_json, output)]
    if not as_json:
        writes.append(lambda: _print(console_of(), report, beside, timeline, answers=answers))
    write_all(*writes)


def _divided(ranks: str | None) -> Divided:
    """What ``--ranks`` says, which is for processes that torchrun started."""
    if ranks not in (None, "rows", "tensors"):
        raise ConfigError(f"--ranks {ranks}: rows or tensors")
    if ranks is not None and "RANK" not in os.environ:
        raise ConfigError(
            f"--ranks {ranks}: there are no ranks to divide it; start it with torchrun, or leave "
            "it out"
        )
    return cast("Divided", ranks or "rows")


def _run(
    request: GenerateRun,
    *,
    divided: Divided,
    machine: Machine | None,
    tiers: tuple[TierLimit, ...],
    limit: dict[str, int],
    watch: Callable[[Session], AbstractContextManager[None]],
) -> GenerateReport | None:
    """Alone, or as a rank of torchrun's job; None on all ranks but the first."""
    from cxl_offload.integrations.fit import node_limits, session_on, tier_limits
    from cxl_offload.integrations.named_tiers import limits_on, with_tiers
    from cxl_offload.integrations.transformers import RankPart, run, session_of
    from cxl_offload.memory.heap import keep_freed_memory
    from cxl_offload.ranks import is_rank_of_job, joined_group, share_machine
    from cxl_offload.topology import discover

    keep_freed_memory()  # activations of CPUs come from malloc, layer after layer
    if not is_rank_of_job():
        here = with_tiers(machine or discover(), tiers)
        held_to = limits_on(here, tiers, limit)
        session = session_on(here, held_to)
        with watch(session), progress_bar() as progress:
            return run(replace(request, limits=held_to), session=session, progress=progress)
    if tiers:
        raise ConfigError(
            "--tier: each rank has a share of the machine; leave it out under torchrun"
        )
    with joined_group():
        share = share_machine(machine)
        held_to = tier_limits(share.machine, limit)
        part = RankPart(share.rank, share.world_size, divided)
        session = session_of(share, node_limits(held_to))
        with watch(session):
            report = run(replace(request, limits=held_to), session=session, part=part)
    return None if share.rank else report


def _print(
    console: Console,
    report: GenerateReport,
    beside: Sequence[str],
    timeline: Timeline | None,
    *,
    answers: bool,
) -> None:
    pages = "simulated nodes" if report.simulated_placement else "real nodes"
    by = "" if report.ranks == 1 else f" by {report.ranks} ranks"
    console.print(
        f"{report.model}: {report.parameters / 1e6:.1f} M parameters, {report.rows} rows of "
        f"{report.prompt_len} + {report.gen_len} tokens; on {report.accelerator or 'the CPU'}"
        f"{by}; {pages} of {report.machine}"
    )
    phases: dict[str, tuple[float | None, float]] = {
        "load": (None, report.load_seconds),
        "prefill": (report.prefill_tokens_per_s, report.prefill_seconds),
        "decode": (report.decode_tokens_per_s, report.decode_seconds),
    }
    show(console, speed_table("measured", phases))
    console.print(load_line(report.load_parts))
    if timeline is not None:
        show(console, simulated_table(timeline))
    for said in beside:
        console.print(f"{said}.")
    show(console, placement_table(report.placement, "kind", simulated=report.simulated_placement))
    for note in report.placement_notes:
        console.print(f"Note: {note}.")
    console.print()
    for said in (*_about_attention(report), *_about_prefixes(report)):
        console.print(said)
    if answers:
        console.print("\nAnswers")
        for said in answer_lines(report.answers):
            console.print(said)


def _about_attention(report: GenerateReport) -> list[str]:
    calls = report.calls
    counts = f"{calls.kernel} over the cache in place, {calls.prompt} of prompts"
    said = [f"Calls of attention: {counts}"]
    if calls.joined or calls.accelerator:
        said.append(
            f"Of those in place {calls.joined} joined a part on the accelerator; "
            f"{calls.accelerator} more had all of their cache there"
        )
    own = calls.own.items()
    said += [f"Note: {count} calls by the model's own attention, for {why}." for why, count in own]
    return said


def _about_prefixes(report: GenerateReport) -> list[str]:
    counts = report.prefixes
    if counts is None:
        return []
    said = [
        f"Prompt tokens whose KV was found: {counts.found_tokens} of {counts.prompt_tokens} "
        f"({counts.hit_rate:.0%}); new blocks kept for the next run: {counts.kept_blocks}"
    ]
    if counts.damaged_blocks:
        said.append(f"Note: {counts.damaged_blocks} damaged blocks were dropped.")
    said += [f"Note: all tokens were computed, for {why}." for why in counts.computed]
    return said
