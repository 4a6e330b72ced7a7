"""What a planned run would move, as a trace that a simulated machine can replay.

The trace has one prefill and one decoded token at the mean length, a step a layer, all GPU batches
of a layer together; queues and engines are those that a real run records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cxl_offload.plan.decoding.engine import EngineRates
from cxl_offload.plan.decoding.phases import Block, Sizes, prefill_flops
from cxl_offload.plan.gpu import PREFILL_EFFICIENCY
from cxl_offload.plan.hardware import Hardware
from cxl_offload.sim import Engines
from cxl_offload.sim.trace import Event, Trace
from cxl_offload.topology import Machine


def cpu_engines(machine: Machine, engine: EngineRates) -> Engines:
    """Arithmetic of the CPUs at the engine's rate of attention, which no machine file has."""
    cores = len(machine.node(machine.initiator).cpus)
    return Engines(cpu_flops_per_s=max(1, cores) * engine.attention_flops_per_core)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Bytes of one layer: weights off the GPU, KV of one token of every sequence, by node."""

    weights: Mapping[int, int]
    weights_cpu: Mapping[int, int]
    weights_drive: int
    kv_token: Mapping[int, float]
    kv_token_gpu: float
    kv_token_drive: float
    stage: int
    scratch: int


def _layer(job: Sizes, hardware: Hardware, block: Block) -> _Layer:
    each = job.kv_bytes_per_token / job.layers * block.sequences
    nodes = [tier.node for tier in hardware.nodes]

    def a_layer(nbytes: Sequence[float]) -> dict[int, int]:
        pairs = zip(nodes, nbytes, strict=False)
        return {node: int(count // job.layers) for node, count in pairs if count}

    kv = zip(nodes, block.kv_host, strict=True)
    return _Layer(
        weights=a_layer(block.weights_host),
        weights_cpu=a_layer(block.weights_cpu),
        weights_drive=int(block.weights_drive // job.layers),
        kv_token={node: share * each for node, share in kv if share},
        kv_token_gpu=each * block.kv_gpu,
        kv_token_drive=each * block.kv_drive,
        stage=nodes[0],
        scratch=nodes[block.scratch],
    )


def planned_trace(job: Sizes, hardware: Hardware, block: Block) -> Trace:
    """Events of one prefill and of one decoded token of every sequence."""
    layer = _layer(job, hardware, block)
    trace = Trace()
    for step in range(job.layers):
        _weights(trace, "prefill", step, layer)
        _prefill(trace, step, (job, hardware, block), layer)
    for step in range(job.layers, 2 * job.layers):
        _weights(trace, "decode", step, layer)
        _decode(trace, step, (job, hardware, block), layer)
    trace.count_tokens("prefill", block.sequences * job.prompt)
    trace.count_tokens("decode", block.sequences)
    return trace


def _weights(trace: Trace, phase: str, step: int, layer: _Layer) -> None:
    if layer.weights_drive:
        staged = {layer.stage: layer.weights_drive}
        trace.append(Event(phase, step, "load_weight", "nvme", "weights", {}, staged))
        moved = layer.weights_drive
        trace.append(Event(phase, step, "load_weight", "h2d", "weights", staged, {}, moved))
    if layer.weights:
        moved = sum(layer.weights.values())
        trace.append(Event(phase, step, "load_weight", "h2d", "weights", layer.weights, {}, moved))


def _scaled(per_node: Mapping[int, float], tokens: float) -> dict[int, int]:
    return {node: round(each * tokens) for node, each in per_node.items()}


def _prefill(trace: Trace, step: int, run: tuple[Sizes, Hardware, Block], layer: _Layer) -> None:
    job, hardware, block = run
    flops = prefill_flops(job, block.sequences) / job.layers
    if hardware.has_gpu:
        if layer.weights_cpu:
            moved = sum(layer.weights_cpu.values())
            read = layer.weights_cpu
            trace.append(Event("prefill", step, "load_weight", "h2d", "weights", read, {}, moved))
        # As operations at the peak, of which large products reach this share.
        at_peak, resident = flops / PREFILL_EFFICIENCY, int(job.weight_bytes // job.layers)
        trace.append(Event("prefill", step, "compute", "gpu", "act", {}, {}, resident, at_peak))
    else:
        flops *= job.engine.attention_flops_per_core / job.engine.prefill_flops_per_core
        trace.append(
            Event("prefill", step, "compute", "cpu", "weights", layer.weights_cpu, {}, 0, flops)
        )
    stored = _scaled(layer.kv_token, job.prompt)
    if stored and hardware.has_gpu:
        moved = sum(stored.values())
        trace.append(Event("prefill", step, "store_cache", "d2h", "kv", {}, stored, moved))
    elif stored:
        trace.append(Event("prefill", step, "store_cache", "cpu", "kv", {}, stored))
    if layer.kv_token_drive:
        staged = {layer.stage: round(layer.kv_token_drive * job.prompt)}
        moved = staged[layer.stage]
        trace.append(Event("prefill", step, "store_cache", "d2h", "kv", {}, staged, moved))
        trace.append(Event("prefill", step, "store_cache", "nvme", "kv", staged, {}))


def _decode(trace: Trace, step: int, run: tuple[Sizes, Hardware, Block], layer: _Layer) -> None:
    job, hardware, block = run
    tokens = job.mean_kv_tokens
    read = _scaled(layer.kv_token, tokens)
    if layer.kv_token_drive:
        staged = round(layer.kv_token_drive * tokens)
        trace.append(Event("decode", step, "load_cache", "nvme", "kv", {}, {layer.stage: staged}))
        read[layer.stage] = read.get(layer.stage, 0) + staged
    if hardware.has_gpu:
        on_gpu = round(layer.kv_token_gpu * tokens)
        resident = (job.weight_bytes - sum(block.weights_cpu)) // job.layers
        work = int(resident) * block.batches + on_gpu
        flops = 2.0 * (job.params - block.params_cpu) * block.sequences / job.layers
        trace.append(Event("decode", step, "compute", "gpu", "act", {}, {}, work, flops))
    if layer.weights_cpu:
        passes = {node: nbytes * block.batches for node, nbytes in layer.weights_cpu.items()}
        flops = 2.0 * block.params_cpu * block.sequences / job.layers
        flops *= job.engine.attention_flops_per_core / job.engine.products_flops_per_core
        trace.append(Event("decode", step, "compute", "cpu", "weights", passes, {}, 0, flops))
    if read and not job.engine.workspace_bytes_per_element:
        flops = 4 * tokens * job.query_width * block.sequences * (1 - block.kv_gpu)
        trace.append(Event("decode", step, "compute", "cpu", "kv", read, {}, 0, flops))
    elif read:
        workspace = {layer.scratch: 2 * sum(read.values())}  # half precision becomes single
        trace.append(Event("decode", step, "load_cache", "cpu", "kv", read, workspace))
        elements = sum(read.values()) / 2
        trace.append(
            Event("decode", step, "compute", "cpu", "workspace", workspace, {}, 0, 2.0 * elements)
        )
    if block.activations_gpu < 1 and hardware.has_gpu:
        hidden = round(2 * block.sequences * job.width * (1 - block.activations_gpu))
        there = {layer.scratch: hidden}
        trace.append(Event("decode", step, "hidden", "h2d", "act", there, {}, hidden))
        trace.append(Event("decode", step, "hidden", "d2h", "act", {}, there, hidden))
