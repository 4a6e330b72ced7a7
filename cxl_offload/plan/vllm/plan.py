"""Plans of inference with vLLM: how many layers' weights leave the GPU, and where they and KV go.

vLLM offloads whole parameters, layer after layer, while ``--cpu-offload-gb`` has room, and
copies them in every step; the GPU memory they leave is KV cache. Every number of layers is tried;
layers are alike, so the nodes with the fastest copies to the GPU take theirs first, which no
other order beats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cxl_offload.errors import ConfigError
from cxl_offload.plan.flexgen.plan import CXL, CXL_MARGIN
from cxl_offload.plan.flexgen.prices import knobs
from cxl_offload.plan.hardware import HOST_USABLE, NVME, Hardware, hardware_of
from cxl_offload.plan.known_errors import VLLM_ERROR
from cxl_offload.plan.model.config import ModelConfig
from cxl_offload.plan.plan_file import Batch, CxlUse, Home, PhaseEstimate, Plan, PriceEstimate
from cxl_offload.plan.replay_check import Replay, disagreements, simulated_seconds
from cxl_offload.plan.vllm.flags import offload_flags
from cxl_offload.plan.vllm.offload import (
    WeightOffload,
    compute_seconds_per_step,
    copy_seconds_per_step,
    kv_room_bytes,
    running_sequences,
    tokens_per_s,
)
from cxl_offload.plan.vllm.trace import planned_step
from cxl_offload.sim import Engines
from cxl_offload.topology import Machine
from cxl_offload.units import format_bytes

__all__ = ["VllmRequest", "copies_bytes_per_s", "layer_bytes", "plan_vllm"]

GPU_UTILIZATION = 0.9
"""vLLM's default for ``--gpu-memory-utilization``."""

GPU_RESERVED = 2 << 30
"""GPU memory of activations, workspaces and graphs. Assumed; vLLM measures it when it starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRequest:
    """What is to be planned for vLLM.

    Attributes
    ----------
    model_name
        As the command shall name it.
    kv_host_bytes
        Host memory for KV blocks evicted from the GPU (prefix reuse); its speed is not modelled.
    most_sequences
        vLLM's ``--max-num-seqs``.
    replay
        Charges time for a step's bytes apart from the equations, the simulator by default; where it
        differs by more than 10 % the plan's notes say so. None: no replay.
    """

    model: ModelConfig
    machine: Machine
    prompt: int
    generated: int
    model_name: str
    tiers: Sequence[str] | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    kv_host_bytes: int = 0
    most_sequences: int = 256
    gpu_reserved_bytes: int = GPU_RESERVED
    host_usable: float = HOST_USABLE
    gpu_usable: float = GPU_UTILIZATION
    cxl_margin: float = CXL_MARGIN
    replay: Replay | None = simulated_seconds


@dataclass(frozen=True, slots=True)
class _Found:
    """``layers`` offloaded, on every node; ``case`` has the rate of their copies."""

    hardware: Hardware
    layers: tuple[int, ...]
    kv: tuple[int, ...]
    case: WeightOffload
    offload_bytes: int
    tokens_per_s: float


def layer_bytes(model: ModelConfig) -> int:
    """Weights of one layer in half precision."""
    inner = [t for t in model.tensors() if t.kind in ("attention", "mlp", "norm", "router")]
    if model.layers > 1:  # the norm after the last layer is not in one
        inner = [t for t in inner if t.count % model.layers == 0]
    return 2 * sum(t.elements for t in inner) // model.layers


def copies_bytes_per_s(hardware: Hardware, layers: Sequence[int]) -> float:
    """Rate at which the offloaded layers cross the link, one after the other."""
    rates = [min(t.copy_bytes_per_s, hardware.link_bytes_per_s) for t in hardware.nodes]
    seconds = sum(count / rate for count, rate in zip(layers, rates, strict=True))
    return sum(layers) / seconds if seconds else hardware.link_bytes_per_s


def _fill(hardware: Hardware, count: int, each: int, rooms: Sequence[float]) -> list[int] | None:
    """``count`` things of ``each`` bytes on the nodes with the fastest copies; None: no room."""
    order = sorted(
        range(len(rooms)),
        key=lambda at: (
            -min(hardware.nodes[at].copy_bytes_per_s, hardware.link_bytes_per_s),
            at,
        ),
    )
    placed = [0] * len(rooms)
    left = count
    for at in order:
        placed[at] = min(left, int(rooms[at] // each))
        left -= placed[at]
    return placed if left == 0 else None


def _case(
    request: VllmRequest, hardware: Hardware, gpu_memory: float, rate: float
) -> WeightOffload:
    model = request.model
    return WeightOffload(
        params=model.active_parameters,
        weight_bytes=2.0 * model.parameters,
        kv_bytes_per_token=model.kv_bytes_per_token(),
        gpu_memory_bytes=gpu_memory,
        usable_fraction=request.gpu_usable,
        gpu_reserved_bytes=request.gpu_reserved_bytes,
        gpu=hardware.gpu,
        mean_tokens_per_sequence=request.prompt + request.generated / 2,
        max_running_sequences=request.most_sequences,
        link_bytes_per_s=rate,
    )


def _search(request: VllmRequest, hardware: Hardware, gpu_memory: float) -> _Found | None:
    each = layer_bytes(request.model)
    best: _Found | None = None
    rooms = [tier.usable_bytes for tier in hardware.nodes]
    for count in range(request.model.layers + 1):
        layers = _fill(hardware, count, each, rooms)
        if layers is None:
            break
        left = [room - each * held for room, held in zip(rooms, layers, strict=True)]
        kv = _spread_kv(request.kv_host_bytes, left)
        if kv is None:
            break
        case = _case(request, hardware, gpu_memory, copies_bytes_per_s(hardware, layers))
        longest = case.kv_bytes_per_token * (request.prompt + request.generated)
        if kv_room_bytes(case, float(count * each)) < longest:
            continue
        rate = tokens_per_s(case, float(count * each))
        if rate > 0 and (best is None or rate > best.tokens_per_s * (1 + 1e-9)):
            best = _Found(hardware, tuple(layers), tuple(kv), case, count * each, rate)
    return best


def _spread_kv(nbytes: int, rooms: Sequence[float]) -> list[int] | None:
    """Evicted KV where there is room, in the order of the nodes."""
    placed, left = [], nbytes
    for room in rooms:
        here = min(left, max(0, int(room)))
        placed.append(here)
        left -= here
    return placed if left == 0 else None


def plan_vllm(request: VllmRequest) -> Plan:
    """The plan for vLLM with the most decoded tokens a second.

    Raises
    ------
    ConfigError
        The machine lacks what the equations need.
    MemoryError
        No offload leaves room for one sequence.
    ValueError
        An encoder, or lengths the model cannot have.
    """
    model = request.model
    if not model.generates:
        raise ValueError(f"{model.name} is an encoder ({model.family}): it generates nothing")
    if request.prompt < 1 or request.generated < 1:
        raise ValueError("prompt and generated tokens: at least 1 each")
    if request.prompt + request.generated > model.positions:
        raise ValueError(
            f"prompt of {request.prompt} and answer of {request.generated} tokens are longer than "
            f"the {model.positions} positions of {model.name}; shorten one of them"
        )
    if request.tiers is not None and NVME in request.tiers:
        raise ConfigError("tier nvme: vLLM's weight offload has no drive; leave it out")
    hardware = hardware_of(
        request.machine,
        tiers=request.tiers,
        limits=request.limits,
        host_usable=request.host_usable,
    )
    gpu_memory = float(request.machine.gpus[0].memory_bytes or 0)
    found, cxl = _weigh_cxl(request, hardware.without(NVME), gpu_memory)
    return _plan(request, found, cxl)


def _weigh_cxl(
    request: VllmRequest, hardware: Hardware, gpu_memory: float
) -> tuple[_Found, CxlUse]:
    best = _search(request, hardware, gpu_memory)
    if best is None:
        rooms = ", ".join(f"{t.name} {format_bytes(t.usable_bytes)}" for t in hardware.nodes)
        raise MemoryError(
            f"plan {request.model.name} on {hardware.machine} for vLLM: "
            f"{format_bytes(2 * request.model.parameters)} of weights and one sequence fit in no "
            f"way; GPU {format_bytes(gpu_memory * request.gpu_usable)}, host {rooms}"
        )
    cxl = [at for at, tier in enumerate(hardware.nodes) if tier.tier == CXL]
    if not cxl:
        return best, CxlUse(used=False, gain=None, reason="there is no CXL tier to use")
    used = any(best.layers[at] or best.kv[at] for at in cxl)
    alone = hardware.without(CXL)
    without = _search(request, alone, gpu_memory) if alone.nodes else None
    if without is None:
        return best, CxlUse(used=used, gain=None, reason="without CXL memory nothing fits")
    gain = best.tokens_per_s / without.tokens_per_s - 1
    if used and gain >= max(request.cxl_margin, 1e-12):
        reason = "its room takes layers off the GPU, which becomes KV cache"
        return best, CxlUse(used=True, gain=gain, reason=reason)
    reason = "other memory holds all weights worth taking off the GPU"
    return without, CxlUse(used=False, gain=max(0.0, gain), reason=reason)


def _homes(model: ModelConfig, found: _Found, each: int) -> tuple[Home, ...]:
    total = 2 * model.parameters
    homes = []
    resident = total - found.offload_bytes
    if resident:
        homes.append(
            Home(kind="weights", where="gpu", bytes=resident, percent=100 * resident / total)
        )
    evicted = sum(found.kv)
    for tier, layers, kv in zip(found.hardware.nodes, found.layers, found.kv, strict=True):
        where = tier.where
        parts = (("weights", layers * each, total), ("kv evicted", kv, evicted))
        for kind, nbytes, whole in parts:
            if nbytes:
                percent = 100 * nbytes / whole
                policy = f"bind:{tier.name}"
                homes.append(
                    Home(kind=kind, where=where, bytes=nbytes, percent=percent, policy=policy)
                )
    return tuple(homes)


def _command(request: VllmRequest, found: _Found, each: int) -> tuple[str, ...]:
    made = ["vllm", "serve", request.model_name, "--dtype", "auto"]
    made += ["--max-model-len", str(request.prompt + request.generated)]
    made += ["--max-num-seqs", str(request.most_sequences)]
    made += ["--gpu-memory-utilization", f"{request.gpu_usable:g}"]
    names = [tier.name for tier in found.hardware.nodes]
    weights = {name: count * each for name, count in zip(names, found.layers, strict=True)}
    made += offload_flags(weights, dict(zip(names, found.kv, strict=True)))
    return tuple(made)


def _plan(request: VllmRequest, found: _Found, cxl: CxlUse) -> Plan:
    model, case, hardware = request.model, found.case, found.hardware
    each = layer_bytes(model)
    offload = float(found.offload_bytes)
    node_bytes = {
        tier.node: layers * each + kv
        for tier, layers, kv in zip(hardware.nodes, found.layers, found.kv, strict=True)
    }
    terms = {
        "weight copies": copy_seconds_per_step(case, offload),
        "GPU work": compute_seconds_per_step(case, offload),
    }
    running = running_sequences(case, offload)
    return Plan(
        kind="inference",
        executor="vllm",
        runs=True,
        model=model.name,
        machine=hardware.machine,
        command=_command(request, found, each),
        batch=Batch(
            size=max(1, int(running)), count=1, prompt=request.prompt, tokens=request.generated
        ),
        homes=_homes(model, found, each),
        node_bytes=node_bytes,
        gpu_bytes=int(case.gpu_memory_bytes * case.usable_fraction),
        tokens_per_s=found.tokens_per_s,
        phases=(
            PhaseEstimate(
                name="decode, one step",
                seconds=sum(terms.values()),
                bottleneck=max(terms, key=lambda term: terms[term]),
                terms=terms,
            ),
        ),
        cxl=cxl,
        prices=_prices(request, found),
        error=VLLM_ERROR,
        notes=(
            *hardware.notes,
            f"{sum(found.layers)} of {model.layers} layers off the GPU, {running:.1f} sequences "
            "at once in the mean",
            f"{format_bytes(request.gpu_reserved_bytes)} of GPU memory taken for workspaces: "
            "assumed, vLLM measures it",
            *_replayed(request, found, sum(terms.values())),
        ),
    )


def _replayed(request: VllmRequest, found: _Found, step_s: float) -> list[str]:
    """What a replay of one step's bytes disagrees on."""
    if request.replay is None:
        return []
    replay = request.replay
    tiers = zip(found.hardware.nodes, found.layers, strict=True)
    nodes = [tier.node for tier, count in tiers for _ in range(count)]
    each = layer_bytes(request.model)
    trace = planned_step(found.case, request.model.layers, each, nodes)
    return disagreements({"decode": step_s}, lambda: replay(trace, request.machine, Engines()))


def _prices(request: VllmRequest, found: _Found) -> tuple[PriceEstimate, ...]:
    """Tokens/s of one unit more, planned again."""
    made = []
    for knob in knobs(found.hardware):
        gpu_memory = found.case.gpu_memory_bytes
        more = found.hardware
        if knob.what == "GPU memory":
            gpu_memory += knob.unit_size
        elif "(CPU)" in knob.what:
            continue  # nothing is computed on the CPU
        else:
            more = knob.with_value(knob.value + knob.unit_size)
        again = _search(request, more, gpu_memory)
        gain = 0.0 if again is None else max(0.0, again.tokens_per_s - found.tokens_per_s)
        made.append(PriceEstimate(what=knob.what, unit=knob.unit, gain_tokens_per_s=gain))
    return tuple(made)
