"""``cxl-offload plan``: batch and placement for a model on a machine, and the command to run it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from cxl_offload.cli._plan_cache import cache, compare
from cxl_offload.cli._plan_report import print_plan
from cxl_offload.cli._report_table import need_matplotlib, show, table
from cxl_offload.errors import ConfigError
from cxl_offload.units import parse_bytes

if TYPE_CHECKING:
    from cxl_offload.plan.flexgen.planner import Interleave
    from cxl_offload.plan.plan_file import Plan
    from cxl_offload.plan.replay_check import Replay
    from cxl_offload.topology import Machine

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the subcommands."""
    group = typer.Typer(help="Plan batch and placement for a model on a machine.")
    group.command("inference")(inference)
    group.command("training")(training)
    group.command("objects")(objects)
    group.command("show")(show_plan)
    group.command("compare")(compare)
    group.command("cache")(cache)
    app.add_typer(group, name="plan")


_DRAWN_STEPS = 12

_OBJECTS_VERSION = 1
"""Of what ``plan objects --json`` prints."""

_WISHES: dict[str, Interleave] = {"auto": "auto", "always": "always", "never": "never"}

_Model = Annotated[
    str, typer.Option(help="A folder with config.json, such a file, or a shipped name (opt-30b).")
]
_Machine = Annotated[
    str | None, typer.Option(help="A machine file or shipped name; by default this machine.")
]
_Profile = Annotated[
    str | None, typer.Option(help="Measurements of `cxl-offload profile`; they replace the file's.")
]
_Output = Annotated[Path | None, typer.Option(help="Write the plan there, e.g. plan.yaml.")]
_Timeline = Annotated[
    Path | None, typer.Option(help="Draw the replay of the plan there (PNG, SVG or PDF).")
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
_Tiers = Annotated[
    str | None, typer.Option(help="Tiers that may be used, e.g. ldram,cxl; default: all.")
]
_Limit = Annotated[
    list[str] | None, typer.Option(help="Most of a tier to use, TIER=SIZE; may be repeated.")
]
_Add = Annotated[
    list[str] | None,
    typer.Option(help="Memory to plan as if it were there: cxl=256GiB:40GB/s:250ns; repeatable."),
]


def inference(
    model: _Model,
    machine: _Machine = None,
    profile: _Profile = None,
    add: _Add = None,
    prompt_len: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 512,
    gen_len: Annotated[int, typer.Option(help="Tokens to generate.")] = 32,
    tiers: _Tiers = None,
    limit: _Limit = None,
    max_batches: Annotated[int | None, typer.Option(help="Most GPU batches in a block.")] = None,
    executor: Annotated[
        str,
        typer.Option(
            help="flexgen, flexgen-stock (as published), vllm, or auto: the faster of flexgen and "
            "vllm, as far as they run the model."
        ),
    ] = "auto",
    kv_host: Annotated[
        str | None, typer.Option(help="vLLM: host memory for evicted KV, e.g. 64GiB.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="vLLM: most sequences at once; default 256.")
    ] = None,
    host_usable: Annotated[float, typer.Option(help="Share of host memory to plan with.")] = 0.95,
    gpu_usable: Annotated[
        float | None,
        typer.Option(help="Share of GPU memory to plan with; default 0.8, vLLM 0.9."),
    ] = None,
    cxl_margin: Annotated[
        float, typer.Option(help="Leave CXL and the drive alone when they bring less than this.")
    ] = 0.03,
    interleave: Annotated[
        list[str] | None,
        typer.Option(help="FlexGen: weights|kv=auto|always|never; may be repeated."),
    ] = None,
    path: Annotated[
        str | None, typer.Option(help="FlexGen's weight folder, passed on to the command.")
    ] = None,
    timeline: _Timeline = None,
    output: _Output = None,
    as_json: _Json = False,
) -> None:
    """Batch and placement with the most tokens/s, and the command that realises it."""
    from cxl_offload.plan.flexgen.job import runs_in_flexgen
    from cxl_offload.plan.flexgen.plan import InferenceRequest, plan_inference
    from cxl_offload.plan.model.file import load_model
    from cxl_offload.plan.vllm.plan import VllmRequest, plan_vllm

    config = load_model(model)
    of_flexgen = {"--max-batches": max_batches, "--interleave": interleave, "--path": path}
    of_vllm = {"--kv-host": kv_host, "--max-num-seqs": max_num_seqs}
    wanted = _executors(executor, of_flexgen, of_vllm, runs_in_flexgen(config) is None)
    common: dict[str, Any] = {
        "model": config,
        "machine": _read_machine(machine, profile, add),
        "prompt": prompt_len,
        "generated": gen_len,
        "model_name": model,
        "tiers": _names(tiers),
        "limits": _limits(limit),
        "host_usable": host_usable,
        "cxl_margin": cxl_margin,
    }
    if gpu_usable is not None:
        common["gpu_usable"] = gpu_usable
    served: dict[str, Any] = {} if max_num_seqs is None else {"most_sequences": max_num_seqs}
    plans: dict[str, Callable[[], Plan]] = {
        "flexgen": lambda: plan_inference(
            InferenceRequest(
                **common,
                engine="stock" if executor == "flexgen-stock" else "own",
                machine_name=machine,
                path=path,
                most_batches=max_batches,
                interleave=_interleave(interleave),
            )
        ),
        "vllm": lambda: plan_vllm(
            VllmRequest(
                **common,
                kv_host_bytes=0 if kv_host is None else _size("--kv-host", kv_host),
                **served,
            )
        ),
    }
    with _names_the_line(machine), _drawn(timeline) as replay:
        common["replay"] = replay
        plan = _fastest([plans[name] for name in wanted])
    _deliver(_without_memory(plan, add), output, as_json)


def _executors(
    asked: str,
    of_flexgen: Mapping[str, object],
    of_vllm: Mapping[str, object],
    runs_in_flexgen: bool,
) -> list[str]:
    """Who is planned for; an option that only one of them has is refused with the other."""
    if asked not in ("auto", "flexgen", "flexgen-stock", "vllm"):
        raise ConfigError(f"--executor {asked}: must be auto, flexgen, flexgen-stock or vllm")
    asked = "flexgen" if asked == "flexgen-stock" else asked
    wanted = [asked] if asked != "auto" else ["flexgen", "vllm"] if runs_in_flexgen else ["vllm"]
    for owner, other, options in (("flexgen", "vllm", of_flexgen), ("vllm", "flexgen", of_vllm)):
        for name, value in options.items():
            if value is None:
                continue
            if asked == other:
                raise ConfigError(f"{name}: {other} has no such option; leave it out")
            wanted = [owner]
    return wanted


def _fastest(plans: Sequence[Callable[[], Plan]]) -> Plan:
    """Of the executors that can, the one with the most tokens/s, prompts included."""
    made: list[Plan] = []
    refused: list[MemoryError | ValueError] = []
    for plan in plans:
        try:
            made.append(plan())
        except (MemoryError, ValueError) as error:
            refused.append(error)
    if not made:
        raise refused[0]
    best = max(made, key=lambda plan: plan.tokens_per_s)
    others = [
        f"{plan.executor}: {plan.tokens_per_s:.4g} tokens/s (predicted)"
        for plan in made
        if plan is not best
    ]
    return replace(best, notes=(*best.notes, *others))


def training(
    model: _Model,
    machine: _Machine = None,
    profile: _Profile = None,
    add: _Add = None,
    batch: Annotated[int, typer.Option(help="Sequences of one optimizer step.")] = 16,
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 1024,
    stage: Annotated[
        int | None, typer.Option(min=2, max=3, help="ZeRO stage; default: 2 where it fits.")
    ] = None,
    tiers: _Tiers = None,
    limit: _Limit = None,
    optimizer_gb_s: Annotated[
        float | None, typer.Option(help="What the CPU optimizer draws from local memory, GB/s.")
    ] = None,
    script: Annotated[str, typer.Option(help="The training script of the command.")] = "train.py",
    host_usable: Annotated[float, typer.Option(help="Share of host memory to plan with.")] = 0.95,
    gpu_usable: Annotated[float, typer.Option(help="Share of GPU memory to plan with.")] = 0.8,
    cxl_margin: Annotated[
        float, typer.Option(help="Leave CXL and the drive alone when they bring less than this.")
    ] = 0.03,
    timeline: _Timeline = None,
    output: _Output = None,
    as_json: _Json = False,
) -> None:
    """Micro-batch, accumulation and placement with the shortest step for DeepSpeed."""
    from cxl_offload.plan.model.file import load_model
    from cxl_offload.plan.training.plan import TrainingRequest, plan_training

    with _names_the_line(machine), _drawn(timeline) as replay:
        plan = plan_training(
            TrainingRequest(
                model=load_model(model),
                machine=_read_machine(machine, profile),
                batch=batch,
                tokens=seq_len,
                stage=None if stage is None else (2 if stage == 2 else 3),
                tiers=_names(tiers),
                limits=_limits(limit),
                optimizer_bytes_per_s=None if optimizer_gb_s is None else optimizer_gb_s * 1e9,
                script=script,
                host_usable=host_usable,
                gpu_usable=gpu_usable,
                cxl_margin=cxl_margin,
                replay=replay,
            )
        )
    _deliver(_without_memory(plan, add), output, as_json)


def objects(
    given: Annotated[
        list[str],
        typer.Option("--object", help="NAME=SIZE, or NAME=SIZE,READ,WRITTEN; may be repeated."),
    ],
    machine: _Machine = None,
    profile: _Profile = None,
    trace: Annotated[
        str | None, typer.Option(help="Accesses by kind of tensor, of `flexgen --trace`.")
    ] = None,
    tiers: Annotated[str, typer.Option(help="The local tier, then those to spread over.")] = (
        "ldram,cxl"
    ),
    min_share: Annotated[float, typer.Option(help="Share from which an object is large.")] = 0.1,
    top_k: Annotated[int | None, typer.Option(help="Interleave so many of them.")] = None,
    as_json: _Json = False,
) -> None:
    """Object-level interleaving: which objects to spread over tiers, and with which policy."""
    from cxl_offload.plan.machine_rates import MachineRates
    from cxl_offload.plan.object_policy import (
        ObjectUse,
        TierRate,
        object_policies,
        uses_by_kind,
        uses_of_trace,
    )
    from cxl_offload.sim.trace import Trace

    numbers = MachineRates(_read_machine(machine, profile))
    sizes = {}
    for text in given:
        name, _, counts = text.partition("=")
        sizes[name] = tuple(_size(f"--object {text}", part) for part in counts.split(","))
        if len(sizes[name]) not in (1, 3):
            raise ConfigError(f"--object {text}: expected NAME=SIZE or NAME=SIZE,READ,WRITTEN")
    footprint = {name: counts[0] for name, counts in sizes.items()}
    if trace is not None:
        uses = uses_of_trace(Trace.load(trace), footprint)
    elif all(len(counts) == 3 for counts in sizes.values()):
        uses = tuple(ObjectUse(name, *counts) for name, counts in sizes.items())
    else:
        uses = uses_by_kind(footprint)
    rates = [TierRate(name, numbers.read_bytes_per_s(name)) for name in _names(tiers) or ()]
    found = object_policies(uses, rates, min_share=min_share, top_k=top_k)
    if as_json:
        entries = [{"name": e.name, "policy": e.policy, "reason": e.reason} for e in found]
        print(json.dumps({"version": _OBJECTS_VERSION, "objects": entries}, indent=1))
        return
    made = table("Policies, in the order to allocate", "object", "policy", "why")
    for each in found:
        made.add_row(each.name, each.policy, each.reason)
    console = Console(markup=False, emoji=False, highlight=False)
    show(console, made)
    for note in numbers.notes:
        console.print(f"Note: {note}.")


def show_plan(
    file: Annotated[Path, typer.Argument(help="A plan.yaml.")], as_json: _Json = False
) -> None:
    """Check a plan file and print it."""
    from cxl_offload.plan.plan_file import load_plan

    _deliver(load_plan(file), None, as_json, file=file)


def _read_machine(
    machine: str | None, profile: str | None, add: Sequence[str] | None = None
) -> Machine:
    from cxl_offload.plan.what_if import with_memory
    from cxl_offload.profile import load_profile
    from cxl_offload.topology import discover, load_machine

    found = discover() if machine is None else load_machine(machine)
    if profile is not None:
        measured = load_profile(profile, machine=found if machine is None else None)
        found = measured.applied_to(found)
    for text in add or ():
        found = with_memory(found, text)
    return found


def _without_memory(plan: Plan, add: Sequence[str] | None) -> Plan:
    """A plan for memory that is not there is advice."""
    if not add:
        return plan
    return replace(plan, runs=False, advice=f"planned as if {' and '.join(add)} were there")


@contextmanager
def _drawn(timeline: Path | None) -> Iterator[Replay]:
    """The simulator; the first trace that it replays is drawn, and one must be."""
    from cxl_offload.plan.replay_check import simulated_seconds
    from cxl_offload.sim import Engines, Trace, replay
    from cxl_offload.sim.plot import plot_timeline

    if timeline is None:
        yield simulated_seconds
        return
    need_matplotlib("--timeline")
    is_drawn = False

    def drawn(trace: Trace, machine: Machine, engines: Engines) -> Mapping[str, float]:
        nonlocal is_drawn
        found = replay(trace, machine, engines=engines)
        if not is_drawn:
            decode = [event.step for event in trace if event.phase == "decode"]
            if decode:  # a prefill is so much longer that nothing of a token would be seen
                plot_timeline(found, timeline, first_step=min(decode), steps=_DRAWN_STEPS)
            else:
                plot_timeline(found, timeline, steps=None)
            is_drawn = True
        return found.phase_seconds

    yield drawn
    if not is_drawn:
        raise ConfigError(
            f"--timeline {timeline}: nothing was drawn, since the simulator cannot replay this "
            "plan; without --timeline its notes say why"
        )


@contextmanager
def _names_the_line(machine: str | None) -> Iterator[None]:
    """Says where in the machine's file a number is missing."""
    from cxl_offload.plan.missing import MissingNumberError, located
    from cxl_offload.topology.machine_file import machine_path

    try:
        yield
    except MissingNumberError as error:
        path = None if machine is None else machine_path(machine)
        if path is None:
            raise
        raise located(error, path) from error


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def _limits(texts: list[str] | None) -> Mapping[str, int]:
    limits: dict[str, int] = {}
    for text in texts or []:
        name, sign, size = text.partition("=")
        if not sign or name in limits:
            raise ConfigError(f"--limit {text}: expected TIER=SIZE once a tier, such as cxl=64GiB")
        limits[name] = _size(f"--limit {text}", size)
    return limits


def _interleave(texts: list[str] | None) -> dict[str, Interleave]:
    wishes: dict[str, Interleave] = {}
    for text in texts or []:
        kind, _, wish = text.partition("=")
        if kind not in ("weights", "kv") or kind in wishes or wish not in _WISHES:
            raise ConfigError(
                f"--interleave {text}: expected weights or kv, =, and one of {', '.join(_WISHES)}; "
                "each kind once"
            )
        wishes[kind] = _WISHES[wish]
    return wishes


def _size(where: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _deliver(plan: Plan, output: Path | None, as_json: bool, *, file: Path | None = None) -> None:
    from cxl_offload.files import encode
    from cxl_offload.plan.plan_file import save_plan

    if output is not None:
        save_plan(plan, output)
        file = output
    if as_json:
        json.dump(encode(plan), sys.stdout, indent=1, allow_nan=False)
        print()
        return
    print_plan(
        Console(markup=False, emoji=False, highlight=False),
        plan,
        None if file is None else str(file),
    )
    if output is not None:
        print(f"\nwritten: {output}")
