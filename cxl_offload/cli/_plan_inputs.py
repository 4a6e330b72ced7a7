"""What the subcommands of ``cxl-offload plan`` are given: options, a machine, a replay to draw."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cxl_offload.cli._options import LIMITS, MACHINE, RESULTS
from cxl_offload.cli._report_table import need_matplotlib
from cxl_offload.errors import ConfigError
from cxl_offload.files.named_values import pairs
from cxl_offload.plan.vllm.defaults import MOST_RUNNING
from cxl_offload.report.sections import DRAWN_STEPS
from cxl_offload.units import parse_bandwidth, parse_latency_ns

if TYPE_CHECKING:
    from cxl_offload.plan.flexgen.planner import StripeWish
    from cxl_offload.plan.plan_file import Plan
    from cxl_offload.plan.replay_check import Replay
    from cxl_offload.profile.operators.model import OperatorProfile
    from cxl_offload.sim import Timeline
from cxl_offload.topology import Machine

_WISHES: dict[str, StripeWish] = {"auto": "auto", "always": "always", "never": "never"}

VLLM_ONLY = "vLLM only"

ModelName = Annotated[
    str, typer.Option(help="A folder with config.json, such a file, or a shipped name (opt-30b).")
]
MachineName = Annotated[
    str | None,
    typer.Option(
        help="A machine file or shipped name; by default this machine.", rich_help_panel=MACHINE
    ),
]
ProfileFile = Annotated[
    str | None,
    typer.Option(
        help="Measurements of `cxl-offload profile`; they replace the file's.",
        rich_help_panel=MACHINE,
    ),
]
AddedMemory = Annotated[
    list[str] | None,
    typer.Option(
        help="Memory to plan as if it were there: cxl=256GiB:40GB/s:250ns; repeatable.",
        rich_help_panel=MACHINE,
    ),
]
GpuOnPaper = Annotated[
    str | None,
    typer.Option(
        help="Plan as if the machine had the GPU of a machine file, such as h100; none: for CPUs.",
        rich_help_panel=MACHINE,
    ),
]
Tiers = Annotated[
    str | None,
    typer.Option(
        help="Tiers that may be used, e.g. ldram,cxl; default: all.", rich_help_panel=LIMITS
    ),
]
HostUsable = Annotated[
    float, typer.Option(help="Share of host memory to plan with.", rich_help_panel=LIMITS)
]
Why = Annotated[
    bool, typer.Option("--why", help="Say what the next best placements would have cost.")
]
CxlMargin = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Leave CXL and the drive alone when they bring less than this share.",
        rich_help_panel=LIMITS,
    ),
]
HostKv = Annotated[
    str | None,
    typer.Option(help="Host memory for evicted KV, e.g. 64GiB.", rich_help_panel=VLLM_ONLY),
]
MostSequences = Annotated[
    int | None,
    typer.Option(
        help=f"Most sequences at once; default {MOST_RUNNING}.", rich_help_panel=VLLM_ONLY
    ),
]
KvTypes = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE[,TYPE]",
        help="Types that keys and values may also be kept in, of float8_e4m3fn, float8_e5m2 and "
        "int4 (vLLM has no int4); each loses precision, the fastest is taken.",
        rich_help_panel="transformers and vLLM",
    ),
]
StateTypes = Annotated[
    str | None,
    typer.Option(
        metavar="auto|TYPE[,TYPE]",
        help="Types that momentum and variance may also be kept in, of bfloat16 and uint8 (8 bits, "
        "in blocks); each loses precision and needs this package's CPUAdam, the fastest is taken. "
        "auto: compare them; fewer bits only for --cxl-margin or more, or if float32 lacks room.",
    ),
]
BoundCores = Annotated[
    bool,
    typer.Option(
        help="Let DeepSpeed's launcher bind ranks (numactl) to the socket that is planned for.",
    ),
]
OffloadCheckpoints = Annotated[
    bool,
    typer.Option(
        "--offload-checkpoints",
        help="Let checkpoints of activations lie on the host between forward and backward, where "
        "that brings more than --cxl-margin or nothing else fits.",
    ),
]
SharingGpus = Annotated[
    int | None,
    typer.Option(
        help="GPUs that share every layer (tensor parallel), all alike; default 1.",
        rich_help_panel=VLLM_ONLY,
    ),
]
FirstTokenMost = Annotated[
    str | None,
    typer.Option(
        "--ttft",
        help="Time to the first token, e.g. 2s: no more sequences at once than keep to it.",
        rich_help_panel=VLLM_ONLY,
    ),
]
LaterTokensMost = Annotated[
    str | None,
    typer.Option(
        "--per-token",
        help="Time between later tokens, e.g. 50ms, in the same way.",
        rich_help_panel=VLLM_ONLY,
    ),
]
TimelineFile = Annotated[
    Path | None,
    typer.Option(
        help="Draw the replay of the plan there (PNG, SVG or PDF).", rich_help_panel=RESULTS
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(help="Write the plan there, e.g. plan.yaml.", rich_help_panel=RESULTS),
]


def read_machine(
    machine: str | None,
    profile: str | None,
    add: Sequence[str] | None = None,
    gpu: str | None = None,
    gpus: int | None = None,
) -> Machine:
    """The machine to plan for, with what was measured on it and what it does not have yet.

    Raises
    ------
    ConfigError
        A file or a name that is wrong, a profile of another machine, or ``--gpus`` of several and
        ``--gpu none``.
    """
    from cxl_offload.plan.what_if import with_gpu, with_memory
    from cxl_offload.profile import load_profile
    from cxl_offload.profile.fingerprint import check_same_nodes
    from cxl_offload.topology import discover, load_machine

    found = discover() if machine is None else load_machine(machine)
    if profile is not None:
        measured = load_profile(profile, machine=found if machine is None else None)
        if machine is not None:
            check_same_nodes(measured, found, file=profile)
        found = measured.applied_to(found)
    for text in add or ():
        found = with_memory(found, text)
    planned = found if gpu is None else with_gpu(found, gpu)
    if gpu is not None and gpus is not None and gpus > 1 and not planned.gpus:
        raise ConfigError(f"--gpus {gpus}: --gpu {gpu} plans without any; leave one of them out")
    return planned


def named_gpu(gpu: str | None) -> str | None:
    """``--gpu`` of a training, which needs a GPU.

    Raises
    ------
    ConfigError
        It is ``none``; says what to give in its place.
    """
    from cxl_offload.plan.what_if import NO_GPU

    if gpu is not None and gpu.lower() == NO_GPU:
        raise ConfigError(
            f"--gpu {gpu}: no training is planned for CPUs alone; leave it out, or name a GPU, "
            "such as --gpu h100"
        )
    return gpu


def trained_on(machine: Machine, gpu: str | None) -> tuple[Machine, str | None]:
    """What a training is planned for, and the GPU of it that is not there, asked for or assumed.

    Parameters
    ----------
    gpu
        That was asked for, and that the machine has on paper.
    """
    from cxl_offload.plan.training.assumed_gpu import ASSUMED_GPU, with_assumed_gpu

    planned_for, assumed = with_assumed_gpu(machine)
    return planned_for, ASSUMED_GPU if assumed else gpu


def gpu_share(
    gpu_usable: float | None, gpu: str | None, machine: Machine, executors: Sequence[str]
) -> dict[str, float]:
    """What ``--gpu-usable`` says, as options of a request; none where it is not given.

    Raises
    ------
    ConfigError
        There is no GPU of whose memory it could be a share, and transformers would plan without.
        Other executors say themselves that they need one.
    """
    if gpu_usable is None:
        return {}
    if not machine.gpus and "transformers" in executors:
        without = f"{machine.name} has no GPU" if gpu is None else f"--gpu {gpu} plans without one"
        raise ConfigError(f"--gpu-usable {gpu_usable:g}: {without}; leave it out")
    return {"gpu_usable": gpu_usable}


def seconds_asked(option: str, text: str | None) -> float:
    """A time such as 2s or 50ms, in seconds; none is no limit.

    Raises
    ------
    ConfigError
        Names the option.
    """
    if text is None:
        return math.inf
    try:
        return parse_latency_ns(text) * 1e-9
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def network_rate(text: str | None) -> float | None:
    """What ``--network`` says, in bytes/s.

    Raises
    ------
    ConfigError
        It is no rate.
    """
    try:
        return None if text is None else parse_bandwidth(text)
    except ValueError as error:
        raise ConfigError(f"--network: {error}") from None


def measured_operators(profile: str | None) -> OperatorProfile | None:
    """What a profile says of the CPUs' work; None where it was not measured."""
    from cxl_offload.profile import load_profile

    found = () if profile is None else load_profile(profile).operators
    return next((each for each in found if each.device == "cpu"), None)


def profile_notes(profile: str | None) -> tuple[str, ...]:
    """What a plan says of its profile: that it was measured on a busy machine, where it was."""
    from cxl_offload.profile import load_profile
    from cxl_offload.profile.other_work import OTHER_WORK, disturbed_paths

    found = () if profile is None else disturbed_paths(load_profile(profile))
    if not found:
        return ()
    paths = ", ".join(f"{path.initiator} -> {path.node}" for path in found)
    return (
        f"{profile} was measured on a busy machine, and memory may be faster than it says: "
        f"{OTHER_WORK} (CPUs -> memory: {paths})",
    )


def as_advice(
    plan: Plan, add: Sequence[str] | None, gpu: str | None, machine: Machine, gpus: int | None
) -> Plan:
    """A plan for what is not there is advice.

    Parameters
    ----------
    machine, gpus
        What was planned for, and how many GPUs of it.
    """
    from cxl_offload.plan.what_if import NO_GPU, planned_as_if

    supposed, notes, there = list(add or ()), plan.notes, len(machine.gpus)
    more = gpus is not None and gpus > there
    if gpu is not None and gpu.lower() != NO_GPU:
        supposed.append(f"{gpus} GPUs {gpu}" if more else f"GPU {gpu}")
    elif more:
        supposed.append(f"{gpus} GPUs")
        notes += (
            f"{machine.name} has {'one GPU' if there == 1 else f'{there} GPUs'}, and the plan is "
            f"for {gpus} like it; a machine whose file names {gpus} runs it",
        )
    if not supposed:
        return plan
    return replace(plan, runs=False, advice=planned_as_if(supposed), notes=notes)


@contextmanager
def drawn(timeline: Path | None, seen: list[Timeline] | None = None) -> Iterator[Replay]:
    """The simulator; the first trace that it replays is drawn, and one must be.

    Parameters
    ----------
    timeline
        Where it is drawn.
    seen
        Takes every timeline.
    """
    from cxl_offload.plan.replay_check import simulated_seconds
    from cxl_offload.sim import Engines, Trace, replay
    from cxl_offload.sim.plot import plot_timeline

    if timeline is None and seen is None:
        yield simulated_seconds
        return
    if timeline is not None:
        need_matplotlib("--timeline", timeline)
    is_drawn = False

    def draw(trace: Trace, machine: Machine, engines: Engines) -> Mapping[str, float]:
        nonlocal is_drawn
        found = replay(trace, machine, engines=engines)
        if seen is not None:
            seen.append(found)
        if timeline is not None and not is_drawn:
            decode = [event.step for event in trace if event.phase == "decode"]
            if decode:  # a prefill is so much longer that nothing of a token would be seen
                plot_timeline(found, timeline, first_step=min(decode), steps=DRAWN_STEPS)
            else:
                plot_timeline(found, timeline, steps=None)
            is_drawn = True
        return found.phase_seconds

    yield draw
    if timeline is not None and not is_drawn:
        raise ConfigError(
            f"--timeline {timeline}: nothing was drawn, since the simulator cannot replay this "
            "plan; without --timeline its notes say why"
        )


@contextmanager
def names_the_line(machine: str | None) -> Iterator[None]:
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


def stripes_asked(texts: list[str] | None) -> dict[str, StripeWish]:
    """What of weights and KV is striped."""
    form = f"weights or kv, =, and one of {', '.join(_WISHES)}"
    found = pairs("--interleave", texts, str, form=form)
    for kind, wish in found.items():
        if kind not in ("weights", "kv") or wish not in _WISHES:
            raise ConfigError(f"--interleave {kind}={wish}: expected {form}")
    return {kind: _WISHES[wish] for kind, wish in found.items()}
