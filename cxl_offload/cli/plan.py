"""``cxl-offload plan``: batch and placement for a model on a machine, and the command to run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from cxl_offload.cli._options import LIMITS, AsJson, Limit, names
from cxl_offload.cli._outputs import check_outputs
from cxl_offload.cli._plan_cache import cache, compare
from cxl_offload.cli._plan_choice import executors_asked, fastest, refuse_idle_drive, without_drive
from cxl_offload.cli._plan_fleet import fleet
from cxl_offload.cli._plan_inputs import (
    AddedMemory,
    BoundCores,
    CxlMargin,
    FirstTokenMost,
    GpuOnPaper,
    HostKv,
    HostUsable,
    KvTypes,
    LaterTokensMost,
    MachineName,
    ModelName,
    MostSequences,
    OffloadCheckpoints,
    Output,
    ProfileFile,
    SharingGpus,
    StateTypes,
    Tiers,
    TimelineFile,
    Why,
    as_advice,
    drawn,
    gpu_share,
    measured_operators,
    named_gpu,
    names_the_line,
    network_rate,
    profile_notes,
    read_machine,
    seconds_asked,
    stripes_asked,
    trained_on,
)
from cxl_offload.cli._plan_objects import objects
from cxl_offload.cli._plan_report import deliver
from cxl_offload.cli._progress import progress_bar
from cxl_offload.cli._report_file import ReportFile, write_plan_page
from cxl_offload.errors import ConfigError
from cxl_offload.files.named_values import limits, size
from cxl_offload.plan.usable import CXL_MARGIN, GPU_USABLE, HOST_USABLE
from cxl_offload.plan.vllm.defaults import GPU_UTILIZATION

if TYPE_CHECKING:
    from cxl_offload.plan.plan_file import Plan
    from cxl_offload.plan.training.job import Stage
    from cxl_offload.sim import Timeline
    from cxl_offload.topology import Machine

_FLEXGEN, _DECODERS, _BATCHED = "FlexGen only", "transformers only", "FlexGen and transformers"


def register(app: typer.Typer) -> None:
    """Add the subcommands."""
    group = typer.Typer(help="Plan batch and placement for a model on a machine.")
    for name, command in _COMMANDS.items():
        group.command(name)(command)
    app.add_typer(group, name="plan")


# Long, with many parameters: a line for each option of the command line and field of the request.
def inference(
    model: ModelName,
    machine: MachineName = None,
    profile: ProfileFile = None,
    add: AddedMemory = None,
    gpu: GpuOnPaper = None,
    prompt_len: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 512,
    gen_len: Annotated[int, typer.Option(help="Tokens to generate.")] = 32,
    tiers: Tiers = None,
    limit: Limit = None,
    max_batches: Annotated[
        int | None,
        typer.Option(
            help="Most batches of the accelerator at once; where CPUs compute, most sequences.",
            rich_help_panel=_BATCHED,
        ),
    ] = None,
    executor: Annotated[
        str,
        typer.Option(
            help="flexgen, flexgen-stock (as published), transformers, vllm, or auto: the fastest "
            "of flexgen, transformers and vllm, as far as they run the model."
        ),
    ] = "auto",
    kv_host: HostKv = None,
    max_num_seqs: MostSequences = None,
    ttft: FirstTokenMost = None,
    per_token: LaterTokensMost = None,
    gpus: SharingGpus = None,
    host_usable: HostUsable = HOST_USABLE,
    gpu_usable: Annotated[
        float | None,
        typer.Option(
            help=f"Share of GPU memory to plan with; default {GPU_USABLE:g}, vLLM "
            f"{GPU_UTILIZATION:g}.",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    cxl_margin: CxlMargin = CXL_MARGIN,
    interleave: Annotated[
        list[str] | None,
        typer.Option(
            help="weights|kv=auto|always|never; may be repeated.", rich_help_panel=_FLEXGEN
        ),
    ] = None,
    path: Annotated[
        str | None,
        typer.Option(help="Its weight folder, passed on to the command.", rich_help_panel=_FLEXGEN),
    ] = None,
    kv_dtype: KvTypes = None,
    sockets: Annotated[
        int | None,
        typer.Option(
            help="Most sockets whose cores compute; default 1, the one that the plan begins from.",
            rich_help_panel=_DECODERS,
        ),
    ] = None,
    why: Why = False,
    timeline: TimelineFile = None,
    report: ReportFile = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Batch and placement with the most tokens/s, and the command that realises it.

    Example: cxl-offload plan inference --model opt-30b --machine epyc9354-cxl-a --output p.yaml
    """
    from cxl_offload.plan.flexgen.job import runs_in_flexgen
    from cxl_offload.plan.flexgen.plan import InferenceRequest, plan_inference
    from cxl_offload.plan.model.file import load_model
    from cxl_offload.plan.transformers.plan import TransformersRequest, plan_transformers
    from cxl_offload.plan.vllm.plan import VllmRequest, plan_vllm
    from cxl_offload.plan.vllm.serving import TokenTargets

    written = {"--output": output, "--report": report, "--timeline": timeline}
    check_outputs(written, {"--model": model, "--machine": machine, "--profile": profile})
    config = load_model(model)
    options: dict[tuple[str, ...], dict[str, object]] = {
        ("flexgen", "transformers"): {"--max-batches": max_batches},
        ("flexgen",): {"--interleave": interleave, "--path": path},
        ("transformers", "vllm"): {"--kv-dtype": kv_dtype},
        ("transformers",): {"--sockets": sockets},
        ("vllm",): {
            "--kv-host": kv_host,
            "--max-num-seqs": max_num_seqs,
            "--ttft": ttft,
            "--per-token": per_token,
            "--gpus": gpus,
        },
    }
    wanted = executors_asked(executor, options, runs_in_flexgen(config) is None)
    common: dict[str, Any] = {
        "model": config,
        "machine": read_machine(machine, profile, add, gpu, gpus),
        "prompt": prompt_len,
        "generated": gen_len,
        "model_name": model,
        "tiers": names(tiers),
        "limits": limits(limit),
        "host_usable": host_usable,
        "cxl_margin": cxl_margin,
        "why": why,
        "operators": measured_operators(profile),
    }
    refuse_idle_drive(common, wanted)
    common |= gpu_share(gpu_usable, gpu, common["machine"], wanted)
    kept_as = () if kv_dtype is None else names(kv_dtype) or (kv_dtype,)
    asked = {"most_sequences": max_num_seqs, "gpus": gpus}
    served: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    plans: dict[str, Callable[[], Plan]] = {
        "flexgen": lambda: plan_inference(
            InferenceRequest(
                **common,
                engine="stock" if executor == "flexgen-stock" else "own",
                machine_name=machine,
                path=path,
                most_batches=max_batches,
                interleave=stripes_asked(interleave),
            )
        ),
        "transformers": lambda: plan_transformers(
            TransformersRequest(
                **without_drive(common, wanted),
                machine_name=machine,
                most_batches=max_batches,
                kv_dtypes=kept_as,
                sockets=1 if sockets is None else sockets,
            )
        ),
        "vllm": lambda: plan_vllm(
            VllmRequest(
                **without_drive(common, wanted),
                kv_host_bytes=0 if kv_host is None else size("--kv-host", kv_host),
                targets=TokenTargets(
                    first_token=seconds_asked("--ttft", ttft),
                    per_token=seconds_asked("--per-token", per_token),
                ),
                kv_dtypes=kept_as,
                **served,
            )
        ),
    }
    seen: list[Timeline] = []
    timelines: dict[str, Timeline] = {}

    def noted(name: str) -> Plan:
        seen.clear()
        made = plans[name]()
        if seen:
            timelines[made.executor] = seen[0]
        return made

    def for_machine(other: Machine) -> Plan:
        common.update(machine=other, prices=False)  # the page looks at its speed and batch
        return fastest({name: plans[name] for name in wanted}, lines=not as_json)

    with names_the_line(machine), drawn(timeline, None if report is None else seen) as replay:
        common["replay"] = replay
        here = machine is None and add is None and gpu is None
        asked_of = {name: partial(noted, name) for name in wanted}
        plan = fastest(asked_of, lines=not as_json, here=here)
    plan = as_advice(plan, add, gpu, common["machine"], gpus)
    plan = replace(plan, notes=(*plan.notes, *profile_notes(profile)))

    def write_report() -> None:
        if report is not None:
            own = common["machine"]
            write_plan_page(report, plan, own, timelines.get(plan.executor), for_machine)

    deliver(plan, output, as_json, write_report)


# Long, with many parameters: a line for each option of the command line and field of the request.
def training(
    model: ModelName,
    machine: MachineName = None,
    profile: ProfileFile = None,
    add: AddedMemory = None,
    gpu: GpuOnPaper = None,
    batch: Annotated[int, typer.Option(help="Sequences of one optimizer step.")] = 16,
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 1024,
    stage: Annotated[
        int | None, typer.Option(min=1, max=3, help="ZeRO stage; default: the fastest.")
    ] = None,
    gpus: Annotated[int, typer.Option(help="GPUs of a host, all alike.")] = 1,
    hosts: Annotated[int, typer.Option(help="Hosts, all alike.")] = 1,
    network: Annotated[
        str | None, typer.Option(help="What a GPU sends to other hosts, e.g. 25GB/s.")
    ] = None,
    tiers: Tiers = None,
    limit: Limit = None,
    optimizer_gb_s: Annotated[
        float | None, typer.Option(help="What the CPU optimizer draws from local memory, GB/s.")
    ] = None,
    state_dtype: StateTypes = None,
    offload_checkpoints: OffloadCheckpoints = False,
    flash_attention: Annotated[
        bool,
        typer.Option(
            "--flash-attention", help="The script's attention keeps no scores for the backward."
        ),
    ] = False,
    nvme_path: Annotated[
        str | None,
        typer.Option(
            help="A folder on the drive, where ZeRO stage 3 may keep what memory does not hold; "
            "without it the drive is left alone.",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    bind_cores: BoundCores = False,
    script: Annotated[str, typer.Option(help="The training script of the command.")] = "train.py",
    host_usable: HostUsable = HOST_USABLE,
    gpu_usable: Annotated[
        float, typer.Option(help="Share of GPU memory to plan with.", rich_help_panel=LIMITS)
    ] = GPU_USABLE,
    cxl_margin: CxlMargin = CXL_MARGIN,
    why: Why = False,
    timeline: TimelineFile = None,
    report: ReportFile = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Micro-batch, accumulation and placement with the shortest step for DeepSpeed.

    Example: cxl-offload plan training --model gpt2-xl --machine epyc9354-cxl-a
    """
    from cxl_offload.plan.model.file import load_model
    from cxl_offload.plan.training.plan import TrainingRequest, plan_training
    from cxl_offload.plan.training.ranks import Ranks

    written = {"--output": output, "--report": report, "--timeline": timeline}
    check_outputs(written, {"--model": model, "--machine": machine, "--profile": profile})
    if network is not None and hosts == 1:
        raise ConfigError(
            f"--network {network}: one host sends to no other; give --hosts, or leave it out"
        )
    seen: list[Timeline] = []
    with names_the_line(machine), drawn(timeline, None if report is None else seen) as replay:
        request = TrainingRequest(
            model=load_model(model),
            machine=read_machine(machine, profile, add, named_gpu(gpu), gpus),
            batch=batch,
            tokens=seq_len,
            stage=None if stage is None else cast("Stage", stage),
            tiers=names(tiers),
            limits=limits(limit),
            operators=measured_operators(profile),
            optimizer_bytes_per_s=None if optimizer_gb_s is None else optimizer_gb_s * 1e9,
            script=script,
            ranks=Ranks(gpus=gpus, hosts=hosts, network_bytes_per_s=network_rate(network)),
            flash_attention=flash_attention,
            nvme_path=nvme_path,
            state_dtypes=() if state_dtype is None else names(state_dtype) or (state_dtype,),
            offload_checkpoints=offload_checkpoints,
            bind_cores=bind_cores,
            host_usable=host_usable,
            gpu_usable=gpu_usable,
            cxl_margin=cxl_margin,
            why=why,
            replay=replay,
        )
        with progress_bar(keep=False, lines=False) as tell:
            tell("planning", 0, 1)
            plan = plan_training(request)
    planned_for, not_there = trained_on(request.machine, gpu)
    plan = as_advice(plan, add, not_there, planned_for, gpus)
    plan = replace(plan, notes=(*plan.notes, *profile_notes(profile)))

    def write_report() -> None:
        if report is not None:
            write_plan_page(
                report,
                plan,
                planned_for,
                seen[0] if seen else None,
                lambda other: plan_training(replace(request, machine=other, prices=False)),
            )

    deliver(plan, output, as_json, write_report)


def show_plan(
    file: Annotated[Path, typer.Argument(help="A plan.yaml.")], as_json: AsJson = False
) -> None:
    """Check a plan file and print it.

    Example: cxl-offload plan show plan.yaml
    """
    from cxl_offload.plan.plan_file import load_plan

    deliver(load_plan(file), None, as_json, file=file)


_COMMANDS: dict[str, Callable[..., None]] = {
    "inference": inference,
    "training": training,
    "objects": objects,
    "show": show_plan,
    "compare": compare,
    "cache": cache,
    "fleet": fleet,
}
