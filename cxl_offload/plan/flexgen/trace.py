"""What a planned FlexGen run would move, as a trace that a simulated machine can replay.

The trace has one prefill and one decoded token at the mean length, a step a layer, all GPU batches
of a layer together; queues and engines are those that a real run records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cxl_offload.plan.flexgen.choice import Choice, Loads
from cxl_offload.plan.flexgen.engine import EngineRates
from cxl_offload.plan.flexgen.job import FlexGenJob
from cxl_offload.plan.flexgen.phases import prefill_flops
from cxl_offload.plan.gpu import PREFILL_EFFICIENCY
from cxl_offload.plan.hardware import Hardware
from cxl_offload.sim import Engines
from cxl_offload.sim.trace import Event, Trace
from cxl_offload.topology import Machine

__all__ = ["cpu_attention_engines", "planned_trace"]


def cpu_attention_engines(machine: Machine, engine: EngineRates) -> Engines:
    """CPU attention's arithmetic at the engine's rate, which no machine file has."""
    cores = len(machine.node(machine.initiator).cpus)
    return Engines(cpu_flops_per_s=max(1, cores) * engine.attention_flops_per_core)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Bytes of one layer: weights off the GPU, KV of one token of every sequence, by node."""

    weights: Mapping[int, int]
    weights_drive: int
    kv_token: Mapping[int, float]
    kv_token_gpu: float
    kv_token_drive: float
    stage: int
    scratch: int


def _layer(job: FlexGenJob, hardware: Hardware, choice: Choice, loads: Loads) -> _Layer:
    each = job.kv_bytes_per_token / job.layers * choice.sequences
    nodes = [tier.node for tier in hardware.nodes]
    weights = zip(nodes, loads.weights_host, strict=True)
    kv = zip(nodes, loads.kv_share_host, strict=True)
    return _Layer(
        weights={node: nbytes // job.layers for node, nbytes in weights if nbytes},
        weights_drive=loads.weights_drive // job.layers,
        kv_token={node: share * each for node, share in kv if share},
        kv_token_gpu=each * choice.kv[-1] / choice.gpu_batch,
        kv_token_drive=each * choice.kv[0] / choice.gpu_batch,
        stage=nodes[0],
        scratch=nodes[choice.scratch],
    )


def planned_trace(job: FlexGenJob, hardware: Hardware, choice: Choice, loads: Loads) -> Trace:
    """Events of one prefill and of one decoded token of every sequence."""
    layer = _layer(job, hardware, choice, loads)
    trace = Trace()
    for step in range(job.layers):
        _weights(trace, "prefill", step, layer)
        _prefill(trace, step, job, choice, layer)
    for step in range(job.layers, 2 * job.layers):
        _weights(trace, "decode", step, layer)
        _decode(trace, step, job, choice, layer)
    trace.count_tokens("prefill", choice.sequences * job.prompt)
    trace.count_tokens("decode", choice.sequences)
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


def _prefill(trace: Trace, step: int, job: FlexGenJob, choice: Choice, layer: _Layer) -> None:
    # As operations at the peak, of which large products reach this share.
    flops = prefill_flops(job, choice.sequences) / job.layers / PREFILL_EFFICIENCY
    resident = job.weight_bytes // job.layers
    trace.append(Event("prefill", step, "compute", "gpu", "act", {}, {}, resident, flops))
    stored = _scaled(layer.kv_token, job.prompt)
    if stored:
        moved = sum(stored.values())
        trace.append(Event("prefill", step, "store_cache", "d2h", "kv", {}, stored, moved))
    if layer.kv_token_drive:
        staged = {layer.stage: round(layer.kv_token_drive * job.prompt)}
        moved = staged[layer.stage]
        trace.append(Event("prefill", step, "store_cache", "d2h", "kv", {}, staged, moved))
        trace.append(Event("prefill", step, "store_cache", "nvme", "kv", staged, {}))


def _decode(trace: Trace, step: int, job: FlexGenJob, choice: Choice, layer: _Layer) -> None:
    tokens = job.mean_kv_tokens
    read = _scaled(layer.kv_token, tokens)
    if layer.kv_token_drive:
        staged = round(layer.kv_token_drive * tokens)
        trace.append(Event("decode", step, "load_cache", "nvme", "kv", {}, {layer.stage: staged}))
        read[layer.stage] = read.get(layer.stage, 0) + staged
    on_gpu = round(layer.kv_token_gpu * tokens)
    work = job.weight_bytes // job.layers * choice.batches + on_gpu
    flops = 2.0 * job.params * choice.sequences / job.layers
    trace.append(Event("decode", step, "compute", "gpu", "act", {}, {}, work, flops))
    if read and not job.engine.workspace_bytes_per_element:
        flops = float(sum(read.values()))  # a product and a sum for each element of two bytes
        trace.append(Event("decode", step, "compute", "cpu", "kv", read, {}, 0, flops))
    elif read:
        workspace = {layer.scratch: 2 * sum(read.values())}  # half precision becomes single
        trace.append(Event("decode", step, "load_cache", "cpu", "kv", read, workspace))
        elements = sum(read.values()) / 2
        trace.append(
            Event("decode", step, "compute", "cpu", "workspace", workspace, {}, 0, 2.0 * elements)
        )
    if not choice.activations_on_gpu:
        hidden = 2 * choice.sequences * job.width
        there = {layer.scratch: hidden}
        trace.append(Event("decode", step, "hidden", "h2d", "act", there, {}, hidden))
        trace.append(Event("decode", step, "hidden", "d2h", "act", {}, there, hidden))
