"""Plans of inference with vLLM: how many layers' weights leave the GPU, and where they and KV go.

vLLM offloads whole parameters, layer after layer, while ``--cpu-offload-gb`` has room, and
copies them in every step; the GPU memory they leave is KV cache. Every number of layers is tried;
layers are alike, so the nodes with the fastest copies to the GPU take theirs first, which no
other order beats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cxl_offload.errors import ConfigError
from cxl_offload.plan.asked_tiers import refuse_drive
from cxl_offload.plan.executor import Candidate, Executor, KindBytes, OwnFields
from cxl_offload.plan.gpu import LAYER_S, REQUEST_S, SEQUENCE_S
from cxl_offload.plan.hardware import GPU, NVME, Hardware
from cxl_offload.plan.known_errors import VLLM_ERROR
from cxl_offload.plan.lack_of_room import rooms_in_words, weights_lack_room
from cxl_offload.plan.pipeline import make_plan
from cxl_offload.plan.plan_file import Batch, ErrorEstimate, PhaseEstimate, Plan
from cxl_offload.plan.planned_machine import at_decoding_rates
from cxl_offload.plan.replay_check import NOT_SIMULATED, Replay
from cxl_offload.plan.request import PlanRequest, check_lengths
from cxl_offload.plan.vllm.defaults import GPU_UTILIZATION, KV_BLOCK_TOKENS, MOST_RUNNING
from cxl_offload.plan.vllm.flags import offload_flags
from cxl_offload.plan.vllm.kv_dtype import check_kv_dtype, kv_flags, kv_notes, kv_share
from cxl_offload.plan.vllm.layers import (
    copies_bytes_per_s,
    fill_nodes,
    layer_bytes,
    spread_kv,
)
from cxl_offload.plan.vllm.offload import (
    WeightOffload,
    compute_seconds_per_step,
    copy_seconds_per_step,
    exchange_seconds_per_step,
    kv_room_bytes,
    prefill_seconds_per_step,
    running_sequences,
    tokens_per_s,
)
from cxl_offload.plan.vllm.serving import NO_TARGETS, TokenTargets, serving, within
from cxl_offload.plan.vllm.steps import STEP_TOKENS, ServerSteps
from cxl_offload.plan.vllm.tensor_parallel import check_gpus, exchange_seconds, kv_parts
from cxl_offload.plan.vllm.trace import planned_step
from cxl_offload.sim import Engines
from cxl_offload.units import format_bytes

GPU_RESERVED = 2 << 30
"""GPU memory of activations, workspaces and graphs. Assumed; vLLM measures it when it starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRequest(PlanRequest):
    """What is to be planned for vLLM.

    Attributes
    ----------
    model_name
        As the command shall name it.
    kv_host_bytes
        Host memory for KV blocks evicted from the GPU (prefix reuse); its speed is not modelled.
    most_sequences
        vLLM's ``--max-num-seqs``, or the most that it may be where there are ``targets``.
    targets
        What requests shall see; the plan takes as few sequences at once as that needs.
    kv_dtypes
        What keys and values may be kept as beside the model's own type; the fastest is taken.
    gpus
        That share every layer (``--tensor-parallel-size``), all of one kind, each with a link of
        its own to the host, over which they reach each other too.
    """

    prompt: int
    generated: int
    model_name: str
    kv_host_bytes: int = 0
    most_sequences: int = MOST_RUNNING
    gpus: int = 1
    targets: TokenTargets = NO_TARGETS
    kv_dtypes: Sequence[str] = ()
    gpu_reserved_bytes: int = GPU_RESERVED
    gpu_usable: float = GPU_UTILIZATION

    def __post_init__(self) -> None:
        super(VllmRequest, self).__post_init__()
        if self.most_sequences < 1:
            raise ConfigError(f"at most {self.most_sequences} sequences: at least 1 is needed")
        check_gpus(self.model, self.gpus)
        for name in self.kv_dtypes:
            check_kv_dtype(name)


@dataclass(frozen=True, slots=True)
class LayersOffGpu:
    """Layers on every node, and bytes of evicted KV.

    ``case`` is what one GPU has and does, ``offload_bytes`` what is off each.
    """

    layers: tuple[int, ...]
    kv: tuple[int, ...]
    case: WeightOffload
    offload_bytes: float


def plan_vllm(request: VllmRequest) -> Plan:
    """The plan for vLLM with the most generated tokens a second.

    Raises
    ------
    ConfigError
        The machine lacks what the equations need.
    MemoryError
        No offload leaves room for one sequence.
    ValueError
        An encoder, or lengths the model cannot have.
    """
    return make_plan(_fastest(request))


def _fastest(request: VllmRequest) -> Vllm:
    """With the type of keys and values that is fastest; of equals, the model's own."""
    executors = [Vllm(request, name) for name in ("", *request.kv_dtypes)]
    if len(executors) == 1:
        return executors[0]
    found = [each.search(each.hardware()) for each in executors]
    rates = [0.0 if best is None else best.tokens_per_s for best in found]
    return executors[rates.index(max(rates))]


def planned_server(request: VllmRequest) -> tuple[ServerSteps, Hardware]:
    """The steps of the planned server, and the machine that it was planned with.

    Raises
    ------
    MemoryError
        As :func:`plan_vllm`.
    """
    executor = _fastest(request)
    hardware = executor.hardware()
    found = executor.search(hardware)
    if found is None:
        raise MemoryError(executor.why_nothing_fits(hardware))
    return ServerSteps(found.choice.case, found.choice.offload_bytes), hardware


class Vllm(Executor[LayersOffGpu]):
    """vLLM's search and homes."""

    name = "vllm"
    computes_on_cpu = False

    def __init__(self, request: VllmRequest, kv_dtype: str = "") -> None:
        check_lengths(request.model, request.prompt, request.generated)
        refuse_drive(request.tiers, request.limits, "vLLM's weight offload has no drive")
        self._request = request
        self._each = layer_bytes(request.model)
        self._kv_dtype = kv_dtype

    @property
    def request(self) -> VllmRequest:
        """What is asked for."""
        return self._request

    def error(self) -> ErrorEstimate | None:
        """Of tokens/s with weights off the GPU."""
        return VLLM_ERROR

    def hardware(self) -> Hardware:
        """Without the drive, and with the links of all GPUs."""
        return self._request.hardware(gpus=self._request.gpus).without(NVME)

    def _case(self, hardware: Hardware, rate: float) -> WeightOffload:
        request, model, gpus = self._request, self._request.model, self._request.gpus
        mean = request.prompt + request.generated / 2
        link = hardware.link_bytes_per_s / gpus
        return WeightOffload(
            params=model.active_parameters / gpus,
            weight_bytes=model.checkpoint_bytes / gpus,
            kv_bytes_per_token=self._kv_bytes(mean) / mean,
            gpu_memory_bytes=hardware.gpu_memory_bytes,
            usable_fraction=request.gpu_usable,
            gpu_reserved_bytes=request.gpu_reserved_bytes,
            gpu=hardware.gpu,
            mean_tokens_per_sequence=mean,
            max_running_sequences=request.most_sequences,
            link_bytes_per_s=rate,
            flops_per_token=model.forward_flops(tokens=1, context=mean) / gpus,
            prefill_flops=model.forward_flops(tokens=request.prompt, context=request.prompt / 2)
            / gpus,
            tokens_per_sequence=request.generated,
            exchange_seconds_per_token=exchange_seconds(model, gpus, 1, link),
            exchange_seconds_per_prompt=exchange_seconds(model, gpus, request.prompt, link),
            expert_bytes=sum(model.bytes_of(t) for t in model.tensors() if t.met < 1) / gpus,
            expert_met=model.experts_per_token / model.experts,
            table_bytes=model.looked_up_bytes / gpus,
            step_s=model.layers * LAYER_S,
            sequence_s=SEQUENCE_S,
            request_s=REQUEST_S,
            most_by_prompts=STEP_TOKENS / (1 + request.prompt / request.generated),
        )

    def _kv_bytes(self, tokens: float) -> float:
        """Of one sequence, on one GPU."""
        model = self._request.model
        share = kv_share(self._kv_dtype) / kv_parts(model, self._request.gpus)
        return model.kv_bytes(tokens) * share

    def search(
        self, hardware: Hardware, *, like: Candidate[LayersOffGpu] | None = None
    ) -> Candidate[LayersOffGpu] | None:
        """The best number of layers off the GPU."""
        request, each, gpus = self._request, self._each, self._request.gpus
        best: Candidate[LayersOffGpu] | None = None
        rooms = [node.usable_bytes for node in hardware.nodes]
        for count in range(request.model.layers + 1):
            layers = fill_nodes(hardware, count, each, rooms)
            if layers is None:
                break
            left = [room - each * held for room, held in zip(rooms, layers, strict=True)]
            kv = spread_kv(request.kv_host_bytes, left)
            if kv is None:
                break
            case = self._case(hardware, copies_bytes_per_s(hardware, layers) / gpus)
            off = count * each / gpus
            if kv_room_bytes(case, off) < self._kv_bytes(request.prompt + request.generated):
                continue
            if request.targets.any:
                fewer = within(case, off, request.prompt, request.targets)
                if fewer is None:
                    continue
                case = fewer
            rate = tokens_per_s(case, off)
            if rate > 0 and (best is None or rate > best.tokens_per_s * (1 + 1e-9)):
                best = Candidate(
                    hardware=hardware,
                    choice=LayersOffGpu(tuple(layers), tuple(kv), case, off),
                    tokens_per_s=rate,
                    sequences=max(1, int(running_sequences(case, off))),
                    host=tuple(n * each + held for n, held in zip(layers, kv, strict=True)),
                    gpu_bytes=gpus * int(case.gpu_memory_bytes * case.usable_fraction),
                )
        return best

    def why_nothing_fits(self, hardware: Hardware) -> str:
        """What is needed and what there is."""
        request, model = self._request, self._request.model
        what = f"plan {model.name} on {hardware.machine} for vLLM"
        each = hardware.gpu_memory_bytes * request.gpu_usable
        weights, on_host = model.checkpoint_bytes, hardware.rooms()
        on_host.pop(GPU, None)
        if request.targets.any and self._without_targets().search(hardware) is not None:
            return (
                f"{what}: no number of layers off the GPU and of sequences at once gives "
                f"{request.targets} (predicted); plan without to see what it takes"
            )
        if request.kv_host_bytes and self._without_kv_host().search(hardware) is not None:
            return (
                f"{what}: --kv-host {format_bytes(request.kv_host_bytes)}: usable are "
                f"{rooms_in_words(on_host)}, for these blocks and the layers "
                "off the GPU; give less, or leave it out"
            )
        of_gpus = {GPU: request.gpus * max(0.0, each - request.gpu_reserved_bytes)}
        count = "GPU" if request.gpus == 1 else f"each of {request.gpus} GPUs"
        return weights_lack_room(what, weights, on_host | of_gpus) or (
            f"{what}: {format_bytes(int(weights))} of weights and one sequence fit in no way; "
            f"{count} {format_bytes(each)}, host {rooms_in_words(on_host)}"
        )

    def _without_targets(self) -> Vllm:
        return Vllm(replace(self._request, targets=NO_TARGETS), self._kv_dtype)

    def _without_kv_host(self) -> Vllm:
        return Vllm(replace(self._request, kv_host_bytes=0), self._kv_dtype)

    def batch(self, found: Candidate[LayersOffGpu]) -> Batch:
        """Sequences that run at once, in the mean."""
        request = self._request
        return Batch(size=found.sequences, count=1, prompt=request.prompt, tokens=request.generated)

    def kinds(self, found: Candidate[LayersOffGpu]) -> Iterable[KindBytes]:
        """Weights, and KV blocks that the GPU evicts."""
        policies = [f"bind:{name}" for name in found.hardware.names]
        held = [count * self._each for count in found.choice.layers]
        resident = round(self._request.model.checkpoint_bytes) - sum(held)
        yield KindBytes("weights", resident, held, 0, policies)
        yield KindBytes("kv evicted", 0, found.choice.kv, 0, policies)

    def _longest(self, found: Candidate[LayersOffGpu]) -> int:
        """Tokens of the longest sequence that fits: what the server shall not refuse."""
        choice, request = found.choice, self._request
        room = kv_room_bytes(choice.case, choice.offload_bytes)
        fits = int(room // choice.case.kv_bytes_per_token) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
        return max(request.prompt + request.generated, min(fits, request.model.positions))

    def command(self, found: Candidate[LayersOffGpu]) -> tuple[str, ...]:
        """Of vLLM's server."""
        request, names = self._request, found.hardware.names
        made = ["vllm", "serve", request.model_name, "--dtype", "auto"]
        made += ["--max-model-len", str(self._longest(found))]
        made += ["--max-num-seqs", str(int(found.choice.case.max_running_sequences))]
        made += ["--max-num-batched-tokens", str(STEP_TOKENS)]
        made += ["--gpu-memory-utilization", f"{request.gpu_usable:g}"]
        made += kv_flags(self._kv_dtype)
        held = [count * self._each for count in found.choice.layers]
        weights, kv = (dict(zip(names, each, strict=True)) for each in (held, found.choice.kv))
        made += offload_flags(weights, kv, gpus=request.gpus)
        return tuple(made)

    def _terms(self, found: Candidate[LayersOffGpu]) -> dict[str, float]:
        case, offload = found.choice.case, found.choice.offload_bytes
        terms = {
            "weight copies": copy_seconds_per_step(case, offload),
            "GPU work": compute_seconds_per_step(case, offload),
            "prefill of new requests": prefill_seconds_per_step(case, offload),
        }
        if self._request.gpus > 1:
            terms["sums over the GPUs"] = exchange_seconds_per_step(case, offload)
        return terms

    def own_fields(self, found: Candidate[LayersOffGpu]) -> OwnFields:
        """The type of keys and values, and what a request sees."""
        case, offload = found.choice.case, found.choice.offload_bytes
        seen = serving(case, offload, self._request.prompt)
        return OwnFields(kv_dtype=self._kv_dtype, serving=seen)

    def phases(self, found: Candidate[LayersOffGpu]) -> tuple[PhaseEstimate, ...]:
        """One step: a token of every running sequence, and its part of the prefills."""
        terms = self._terms(found)
        largest = max(terms, key=lambda term: terms[term])
        name = "decode, one step"
        seconds = sum(terms.values())
        return (PhaseEstimate(name=name, seconds=seconds, bottleneck=largest, terms=terms),)

    def equation_seconds(self, found: Candidate[LayersOffGpu]) -> Mapping[str, float]:
        """Predicted seconds of the decode alone, as it is replayed; the simulator has one GPU."""
        if self._request.gpus > 1:
            return {}
        terms = self._terms(found)
        return {"decode": terms["weight copies"] + terms["GPU work"]}

    def replayed_seconds(
        self, found: Candidate[LayersOffGpu], replay: Replay
    ) -> Mapping[str, float]:
        """One decode step of one GPU."""
        if self._request.gpus > 1:
            return {}
        pairs = zip(found.hardware.nodes, found.choice.layers, strict=True)
        nodes = [node.node for node, count in pairs for _ in range(count)]
        trace = planned_step(found.choice.case, self._request.model.layers, self._each, nodes)
        return replay(trace, at_decoding_rates(self.machine(found)), Engines())

    def notes(self, found: Candidate[LayersOffGpu]) -> list[str]:
        """Layers, sequences, and what is assumed."""
        request, choice = self._request, found.choice
        running = running_sequences(choice.case, choice.offload_bytes)
        quantized = request.model.quantization
        kept = [] if quantized is None else [f"weights as {quantized.method} keeps them"]
        shared = [
            f"{request.gpus} GPUs compute every layer together, each its part. The plan assumes "
            "that they send each other their results over their links to the host; with links of "
            "their own (NVLink) the machine is faster than planned",
            NOT_SIMULATED,
        ]
        return [
            *kept,
            *kv_notes(self._kv_dtype),
            *(shared if request.gpus > 1 else ()),
            f"{sum(choice.layers)} of {request.model.layers} layers off the GPU, {running:.1f} "
            "sequences at once in the mean",
            f"{format_bytes(request.gpu_reserved_bytes)} of GPU memory taken for workspaces: "
            "assumed, vLLM measures it",
        ]
