"""Plans of inference: batch, placement, bottlenecks, prices, and whether CXL is worth it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cxl_offload.plan.flexgen.choice import Loads
from cxl_offload.plan.flexgen.flags import command_of, policies_of
from cxl_offload.plan.flexgen.job import FlexGenJob, flexgen_job, runs_in_flexgen
from cxl_offload.plan.flexgen.planner import GPU_BATCHES, Found, Interleave, plan_flexgen
from cxl_offload.plan.flexgen.prices import prices
from cxl_offload.plan.flexgen.trace import cpu_attention_engines, planned_trace
from cxl_offload.plan.hardware import (
    GPU_USABLE,
    HOST_USABLE,
    NVME,
    Hardware,
    hardware_of,
)
from cxl_offload.plan.known_errors import FLEXGEN_ERROR
from cxl_offload.plan.model.config import ModelConfig
from cxl_offload.plan.plan_file import (
    Batch,
    CxlUse,
    Home,
    PhaseEstimate,
    Plan,
    PriceEstimate,
)
from cxl_offload.plan.replay_check import Replay, disagreements, simulated_seconds
from cxl_offload.topology import Machine
from cxl_offload.units import format_bytes

__all__ = ["CXL_MARGIN", "InferenceRequest", "plan_inference", "weigh_cxl"]

CXL_MARGIN = 0.03
"""Gain below which CXL memory is left alone: equations are not exact to less, and published
hierarchies that differ by 3 % count as equal (Wang et al., Performance Characterization, LIO 1)."""

CXL = "cxl"


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    """What is to be planned for FlexGen.

    Attributes
    ----------
    model_name, machine_name, path
        As the printed flags shall name them; ``machine_name`` None: the machine it runs on.
    tiers
        Tiers that may be used, all by default; ``limits`` are the most bytes of a tier.
    interleave
        ``weights``, ``kv``: stripes over tiers where they are faster, ``always``, or ``never``.
    cxl_margin
        Gain (a fraction) below which CXL is left alone; 0 uses it wherever it is faster.
    replay
        Charges time for the plan's bytes apart from the equations, the simulator by default;
        where it differs by more than 10 % the plan's notes say so. None: no replay.
    """

    model: ModelConfig
    machine: Machine
    prompt: int
    generated: int
    model_name: str
    machine_name: str | None = None
    path: str | None = None
    tiers: Sequence[str] | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    gpu_batches: Sequence[int] = GPU_BATCHES
    most_batches: int | None = None
    interleave: Mapping[str, Interleave] = field(default_factory=dict)
    host_usable: float = HOST_USABLE
    gpu_usable: float = GPU_USABLE
    cxl_margin: float = CXL_MARGIN
    replay: Replay | None = simulated_seconds


def plan_inference(request: InferenceRequest) -> Plan:
    """The plan for FlexGen with the most tokens a second.

    Raises
    ------
    ConfigError
        The machine lacks what the equations need, or a limit is impossible.
    MemoryError
        Not one sequence fits; says what is needed and what there is.
    ValueError
        Lengths the model cannot have.
    """
    job = flexgen_job(request.model, prompt=request.prompt, generated=request.generated)
    hardware = hardware_of(
        request.machine,
        tiers=request.tiers,
        limits=request.limits,
        host_usable=request.host_usable,
        gpu_usable=request.gpu_usable,
    )
    hardware, found, cxl = weigh_cxl(request, job, hardware)
    refusal = runs_in_flexgen(request.model)
    unit = found.phases
    return Plan(
        kind="inference",
        executor="flexgen",
        runs=refusal is None,
        advice=refusal or "",
        model=request.model.name,
        machine=request.machine.name,
        command=command_of(request.model_name, machine=request.machine_name, path=request.path),
        batch=Batch(
            size=found.choice.gpu_batch,
            count=found.choice.batches,
            prompt=job.prompt,
            tokens=job.generated,
        ),
        homes=_homes(job, hardware, found),
        node_bytes=hardware.node_bytes(found.loads.host),
        gpu_bytes=found.loads.gpu_bytes,
        drive_bytes=found.loads.weights_drive + found.loads.kv_drive,
        tokens_per_s=unit.tokens_per_s,
        phases=_phases(found),
        cxl=cxl,
        prices=tuple(
            PriceEstimate(what=price.what, unit=price.unit, gain_tokens_per_s=price.tokens_per_s)
            for price in prices(job, hardware, found)
        ),
        error=FLEXGEN_ERROR,
        notes=(
            *hardware.notes,
            *_notes(request, hardware, found),
            *_replayed(request, job, hardware, found),
        ),
    )


def _search(request: InferenceRequest, job: FlexGenJob, hardware: Hardware) -> Found | None:
    if not hardware.nodes:
        return None
    return plan_flexgen(
        job,
        hardware,
        gpu_batches=request.gpu_batches,
        most_batches=request.most_batches,
        interleave=request.interleave,
    )


def weigh_cxl(
    request: InferenceRequest, job: FlexGenJob, hardware: Hardware
) -> tuple[Hardware, Found, CxlUse]:
    """The better of the plans with and without CXL memory, and why.

    Raises
    ------
    MemoryError
        Neither fits.
    """
    best = _search(request, job, hardware)
    if best is None:
        raise MemoryError(_does_not_fit(request, job, hardware))
    cxl = [at for at, tier in enumerate(hardware.nodes) if tier.tier == CXL]
    if not cxl:
        return hardware, best, CxlUse(used=False, gain=None, reason="there is no CXL tier to use")
    used = sum(best.loads.host[at] for at in cxl) > 0
    alone = hardware.without(CXL)
    without = _search(request, job, alone)
    if without is None:
        reason = "without CXL memory not one batch fits"
        return hardware, best, CxlUse(used=used, gain=None, reason=reason)
    gain = best.phases.tokens_per_s / without.phases.tokens_per_s - 1
    if used and gain >= max(request.cxl_margin, 1e-12):
        return hardware, best, CxlUse(used=True, gain=gain, reason=_why_used(best, without))
    reason = _why_not(request, gain, without, alone)
    return alone, without, CxlUse(used=False, gain=max(0.0, gain), reason=reason)


def _why_used(best: Found, without: Found) -> str:
    more = best.choice.sequences - without.choice.sequences
    if more > 0:
        fewer = without.choice.sequences
        return f"its room allows {best.choice.sequences} sequences at once, not {fewer}"
    if best.loads.weights_drive + best.loads.kv_drive < (
        without.loads.weights_drive + without.loads.kv_drive
    ):
        return "it keeps bytes in memory that would be on the drive"
    return "its bandwidth adds to that of the other tiers"


def _why_not(request: InferenceRequest, gain: float, without: Found, alone: Hardware) -> str:
    unused = sum(tier.usable_bytes for tier in alone.nodes) - sum(without.loads.host)
    if gain <= 1e-9:
        start = "CXL memory adds nothing"
    else:
        start = f"CXL memory adds {gain:.1%}, below the margin of {request.cxl_margin:.1%}"
    if without.loads.weights_gpu + without.loads.kv_gpu and not sum(without.loads.host):
        return f"{start}: the GPU holds everything"
    slowest = max(without.phases.decode_terms.items(), key=lambda term: term[1])[0]
    return f"{start}: {slowest} bounds decoding, and {format_bytes(unused)} of other memory is free"


def _does_not_fit(request: InferenceRequest, job: FlexGenJob, hardware: Hardware) -> str:
    rooms = {tier.name: tier.usable_bytes for tier in hardware.nodes}
    rooms |= {"gpu": hardware.gpu_usable_bytes}
    if hardware.drive_usable_bytes:
        rooms[NVME] = hardware.drive_usable_bytes
    shown = ", ".join(f"{name} {format_bytes(room)}" for name, room in rooms.items())
    return (
        f"plan {request.model.name} on {request.machine.name}: weights "
        f"{format_bytes(job.weight_bytes)} + {format_bytes(job.kv_sequence_bytes)} of KV a "
        f"sequence do not fit in any way; usable are {shown}; give more room or shorter sequences"
    )


def _homes(job: FlexGenJob, hardware: Hardware, found: Found) -> tuple[Home, ...]:
    loads = found.loads
    tables: dict[str, tuple[int, Sequence[int], int]] = {
        "weights": (loads.weights_drive, loads.weights_host, loads.weights_gpu),
        "kv": (loads.kv_drive, loads.kv_host, loads.kv_gpu),
        **_scratch_table(job, hardware, found, loads),
    }
    policies = policies_of(job, hardware, found.choice)
    named = [node.where for node in hardware.nodes]
    made: list[Home] = []
    for kind, (drive, host, gpu) in tables.items():
        total = drive + sum(host) + gpu
        entries = [("gpu", gpu, ""), *zip(named, host, policies[kind], strict=True)]
        for where, nbytes, policy in (*entries, (NVME, drive, "")):
            if nbytes:
                share = 100 * nbytes / total
                made.append(
                    Home(kind=kind, where=where, bytes=nbytes, percent=share, policy=policy)
                )
    return tuple(made)


def _scratch_table(
    job: FlexGenJob, hardware: Hardware, found: Found, loads: Loads
) -> dict[str, tuple[int, Sequence[int], int]]:
    choice, size = found.choice, found.choice.gpu_batch
    workspace = 0
    if choice.cpu_attention:
        workspace = job.workspace_tensors(choice.batches) * job.workspace_tensor_bytes(size)
    held = choice.batches * job.hidden_bytes(size) if choice.activations_on_gpu else 0
    tiers = range(len(hardware.nodes))
    act = [loads.scratch[at] - (workspace if at == choice.scratch else 0) for at in tiers]
    work = [workspace if at == choice.scratch else 0 for at in tiers]
    return {"act": (0, act, held), "workspace": (0, work, 0)}


def _phases(found: Found) -> tuple[PhaseEstimate, ...]:
    phases = found.phases
    decode = dict(phases.decode_terms)
    return (
        PhaseEstimate(
            name="prefill",
            seconds=phases.prefill_s,
            bottleneck=max(phases.prefill_terms, key=lambda term: phases.prefill_terms[term]),
            terms=dict(phases.prefill_terms),
        ),
        PhaseEstimate(
            name="decode, one token of every sequence",
            seconds=phases.decode_token_s,
            bottleneck=max(decode, key=lambda term: decode[term]),
            terms=decode,
        ),
    )


def _replayed(
    request: InferenceRequest, job: FlexGenJob, hardware: Hardware, found: Found
) -> list[str]:
    """What a replay of the plan's bytes disagrees on."""
    if request.replay is None:
        return []
    replay, machine = request.replay, request.machine
    trace = planned_trace(job, hardware, found.choice, found.loads)
    equations = {"prefill": found.phases.prefill_s, "decode": found.phases.decode_token_s}
    return disagreements(
        equations, lambda: replay(trace, machine, cpu_attention_engines(machine, job.engine))
    )


def _notes(request: InferenceRequest, hardware: Hardware, found: Found) -> list[str]:
    notes = [
        f"planned with {request.host_usable:.0%} of host and {request.gpu_usable:.0%} of GPU memory"
    ]
    if found.choice.kv_stripe or found.choice.weight_stripe:
        notes.append("striped tensors are static: the kernel must not migrate them")
    if request.machine.simulated:
        notes.append(f"{hardware.machine} is a machine file: its rates are published or assumed")
    return notes
