"""What a planned run would move, as a trace that a simulated machine can replay.

The trace has one prefill and one decoded token at the mean length, a step a layer, all GPU batches
of a layer together; queues and engines are those that a real run records. Where the CPUs of several
sockets compute, each has a queue of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cxl_offload.plan.decoding.block import Block
from cxl_offload.plan.decoding.engine import EngineRates, kv_store_costs
from cxl_offload.plan.decoding.phases import (
    between_products_seconds,
    decode_rows_seconds,
    joined_bytes,
    joined_calls_seconds,
    prefill_between_seconds,
    prefill_cpu_seconds,
    prefill_flops,
    states_calls_seconds,
)
from cxl_offload.plan.decoding.sizes import Sizes
from cxl_offload.plan.equations.sockets import Socket, core_shares
from cxl_offload.plan.gpu import LAYER_S
from cxl_offload.plan.hardware import Hardware
from cxl_offload.sim import Engines
from cxl_offload.sim.trace import Event, Trace
from cxl_offload.topology import Machine


def cpu_engines(machine: Machine, engine: EngineRates) -> Engines:
    """Arithmetic of the CPUs at the engine's rate of attention, which no machine file has."""
    cores = len(machine.node(machine.initiator).cpus)
    return Engines(cpu_flops_per_s=max(1, cores) * engine.attention_flops_per_core)


COPIES = "copies"
"""The class of the kinds that each socket has a copy of."""
"""Kind of tensor of weights that each socket has a copy of, and reads near it."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Bytes of one layer: weights off the GPU, KV of one token of every sequence, by node.

    What is not striped is read from one node after the other.
    """

    weights: Mapping[int, int]
    weights_cpu: Mapping[int, int]
    first_copies: Mapping[int, int]
    near_copies: Mapping[int, int]
    weights_drive: int
    kv_token: Mapping[int, float]
    kv_token_gpu: float
    kv_token_drive: float
    stage: int
    scratch: int
    striped_weights: bool
    striped_kv: bool


def _layer(job: Sizes, hardware: Hardware, block: Block) -> _Layer:
    each = job.kv_bytes_per_token / job.layers * block.sequences
    nodes = [tier.node for tier in hardware.nodes]

    def a_layer(nbytes: Sequence[float]) -> dict[int, int]:
        pairs = zip(nodes, nbytes, strict=False)
        return {node: int(count // job.layers) for node, count in pairs if count}

    kv = zip(nodes, block.kv_host, strict=True)
    near = hardware.copy_nodes if block.weights_copied else ()
    copied = block.weights_copied / job.layers
    rates = {nodes[at]: hardware.nodes[at].read_bytes_per_s for at in near}
    return _Layer(
        weights=a_layer(block.weights_host),
        weights_cpu=a_layer(block.weights_cpu),
        first_copies={nodes[at]: int(copied) for at in near[:1]},
        near_copies={
            node: round(copied * rate / hardware.near_bytes_per_s) for node, rate in rates.items()
        },
        weights_drive=int(block.weights_drive // job.layers),
        kv_token={node: share * each for node, share in kv if share},
        kv_token_gpu=each * block.kv_gpu,
        kv_token_drive=each * block.kv_drive,
        stage=nodes[0],
        scratch=nodes[block.scratch],
        striped_weights=block.weight_shares is not None,
        striped_kv=block.kv_shares is not None,
    )


def _in_turn(read: Mapping[int, int], striped: bool) -> list[dict[int, int]]:
    """What is read together."""
    return [dict(read)] if striped else [{node: count} for node, count in read.items()]


def planned_trace(job: Sizes, hardware: Hardware, block: Block) -> Trace:
    """Events of one prefill and of one decoded token of every sequence."""
    layer, run = _layer(job, hardware, block), (job, hardware, block)
    trace = Trace()
    for step in range(job.layers):
        _weights(trace, "prefill", step, run, layer)
        _prefill(trace, step, run, layer)
    for step in range(job.layers, 2 * job.layers):
        _weights(trace, "decode", step, run, layer)
        _decode(trace, step, run, layer)
    if hardware.sockets:
        every = (part for event in trace for part in _of_sockets(event, hardware))
        trace = Trace(every)
    trace.count_tokens("prefill", block.sequences * job.prompt)
    trace.count_tokens("decode", block.sequences)
    return trace


def _of_sockets(event: Event, hardware: Hardware) -> Iterator[Event]:
    """An event of the CPUs as those of each socket; operations by their cores, so that they take
    as long.

    Of copies each socket reads its own, of all else its part on every node.
    """
    if event.engine != "cpu":
        yield event
        return
    sockets = hardware.sockets

    def part(nbytes: Mapping[int, int], socket: Socket, share: float) -> dict[int, int]:
        if event.tensor_kind == COPIES:
            return {node: count for node, count in nbytes.items() if node == socket.node}
        return {node: round(count * share) for node, count in nbytes.items()}

    for at, (share, socket) in enumerate(zip(core_shares(sockets), sockets, strict=True)):
        yield replace(
            event,
            queue=event.queue if at == 0 else f"{event.queue} of node {socket.node}",
            read_bytes=part(event.read_bytes, socket, share),
            write_bytes=part(event.write_bytes, socket, share),
            flops=event.flops * share,
            cpus=socket.node,
        )


def _weights(
    trace: Trace, phase: str, step: int, run: tuple[Sizes, Hardware, Block], layer: _Layer
) -> None:
    """Beside the work of a token, or before it where the engine does not overlap them."""
    before = phase == "decode" and not run[0].engine.overlaps
    queue = "compute" if before else "load_weight"

    def copied(read: Mapping[int, int]) -> None:
        moved = sum(read.values())
        if moved:
            trace.append(Event(phase, step, queue, "h2d", "weights", read, {}, moved))

    if layer.weights_drive:
        staged = {layer.stage: layer.weights_drive}
        drive = "load_weight" if phase == "prefill" else "load_drive"
        trace.append(Event(phase, step, drive, "nvme", "weights", {}, staged))
        copied(staged)
    for read in _in_turn(layer.weights, layer.striped_weights):
        copied(read)
    _states(trace, phase, step, run)
    if phase == "prefill" and run[1].has_gpu:
        copied(layer.weights_cpu)


def _states(trace: Trace, phase: str, step: int, run: tuple[Sizes, Hardware, Block]) -> None:
    """Hidden states in host memory, which have streams of their own in both directions."""
    job, hardware, block = run
    if block.states is None:
        return
    tokens = job.prompt if phase == "prefill" else 1
    came = block.states.bytes_in(tokens) / job.layers
    went = block.states.bytes_out(tokens) / job.layers

    def on_nodes(nbytes: float) -> dict[int, int]:
        shares = zip(hardware.nodes, block.states.shares, strict=True) if block.states else ()
        return {node.node: round(share * nbytes) for node, share in shares if share}

    read, written = on_nodes(came), on_nodes(went)
    stored = "store_cache" if phase == "prefill" else "store_hidden"
    moved = sum(read.values()), sum(written.values())
    trace.append(Event(phase, step, "load_hidden", "h2d", "act", read, {}, moved[0]))
    trace.append(Event(phase, step, stored, "d2h", "act", {}, written, moved[1]))


def _scaled(per_node: Mapping[int, float], tokens: float) -> dict[int, int]:
    return {node: round(each * tokens) for node, each in per_node.items()}


def _paced(
    run: tuple[Sizes, Hardware, Block],
    read: Mapping[int, int],
    share: float,
    *,
    near: bool = False,
) -> float:
    """Operations that take as long as reading with a share of the nodes' rates.

    ``near``: every socket reads what is near it, and else its part on every node, across the links
    too.
    """
    job, hardware, _ = run
    every = hardware.even_rates
    if near:
        every = tuple(node.read_bytes_per_s for node in hardware.nodes)
    rates = dict(zip((node.node for node in hardware.nodes), every, strict=True))
    times = [nbytes / rates[node] for node, nbytes in read.items()]
    for costs in () if near else hardware.link_costs:
        read_at = {at: read.get(node.node, 0) for at, node in enumerate(hardware.nodes)}
        times.append(sum(read_at[at] * cost for at, cost in costs.items()))
    seconds = max(times, default=0.0) / share
    return seconds * hardware.cores * job.engine.attention_flops_per_core


def _operations(run: tuple[Sizes, Hardware, Block], seconds: float) -> float:
    """Operations of one layer, all of which take the CPUs so many seconds."""
    job, hardware, _ = run
    return seconds / job.layers * hardware.cores * job.engine.attention_flops_per_core


def _prefill(trace: Trace, step: int, run: tuple[Sizes, Hardware, Block], layer: _Layer) -> None:
    job, hardware, block = run
    stored = _scaled(layer.kv_token, job.prompt)
    if not hardware.has_gpu:
        seconds = prefill_cpu_seconds(job, hardware, block.sequences)
        flops = _operations(run, seconds + prefill_between_seconds(job, hardware))
        read = layer.weights_cpu
        flops += _paced(run, read, job.engine.products_share)
        trace.append(Event("prefill", step, "compute", "cpu", "weights", read, {}, 0, flops))
        if read := layer.first_copies:
            flops = _paced(run, read, job.engine.products_share)
            trace.append(Event("prefill", step, "compute", "cpu", "weights", read, {}, 0, flops))
        trace.append(Event("prefill", step, "store_cache", "cpu", "kv", {}, stored))
        return
    flops = prefill_flops(job, block.sequences) / job.layers
    # As operations at the peak, of which large products reach this share.
    at_peak, resident = flops / hardware.gpu.arithmetic_share, int(job.weight_bytes // job.layers)
    trace.append(Event("prefill", step, "compute", "gpu", "act", {}, {}, resident, at_peak))
    if stored:
        trace.append(_stored(step, run, stored))
    if layer.kv_token_drive:
        staged = {layer.stage: round(layer.kv_token_drive * job.prompt)}
        trace.append(_stored(step, run, staged))
        trace.append(Event("prefill", step, "store_cache", "nvme", "kv", staged, {}))


def _stored(step: int, run: tuple[Sizes, Hardware, Block], stored: Mapping[int, int]) -> Event:
    """KV of a prompt on its way to nodes: by the copy engine, or by CPUs in a loop of their own."""
    job, hardware, _ = run
    if job.engine.kv_store_bytes_per_s is None:
        moved = sum(stored.values())
        return Event("prefill", step, "store_cache", "d2h", "kv", {}, stored, moved)
    costs = {
        node.node: cost
        for node, cost in zip(hardware.nodes, kv_store_costs(job.engine, hardware), strict=True)
    }
    seconds = sum(nbytes * costs[node] for node, nbytes in stored.items())
    flops = seconds * hardware.cores * job.engine.attention_flops_per_core
    return Event("prefill", step, "store_cache", "cpu", "kv", {}, stored, 0, flops)


def _decode(trace: Trace, step: int, run: tuple[Sizes, Hardware, Block], layer: _Layer) -> None:
    job, hardware, block = run
    if hardware.has_gpu:
        on_gpu = layer.kv_token_gpu * job.mean_kv_tokens
        if block.joins:
            _calls(trace, step, run, "kv", joined_calls_seconds(job))
            tokens = block.sequences * job.mean_kv_tokens * block.kv_gpu
            on_gpu += joined_bytes(job, tokens) / job.layers
        if block.states is not None:
            _calls(trace, step, run, "act", states_calls_seconds(job))
        resident = (job.weight_bytes - sum(block.weights_cpu) - block.unread) // job.layers
        work = int(resident) * block.batches
        flops = 2.0 * (job.params - block.params_cpu) * block.sequences / job.layers
        # Seconds as operations at the peak.
        calls = block.batches * job.engine.layer_s * hardware.gpu.flops_per_s
        beside = 0.0 if job.engine.in_turn else block.batches * LAYER_S * hardware.gpu.flops_per_s
        at_peak = max(flops / hardware.gpu.arithmetic_share, calls - beside)
        trace.append(Event("decode", step, "compute", "gpu", "act", {}, {}, work, at_peak))
        if beside:
            trace.append(Event("decode", step, "compute", "gpu", "act", {}, {}, 0, beside))
        if round(on_gpu):
            trace.append(Event("decode", step, "compute", "gpu", "kv", {}, {}, round(on_gpu)))
    elif job.engine.layer_s:
        seconds = between_products_seconds(job, hardware)
        between = _operations(run, seconds + decode_rows_seconds(job, hardware, block.sequences))
        trace.append(Event("decode", step, "compute", "cpu", "act", {}, {}, 0, between))
    _products(trace, step, run, layer)
    _attention(trace, step, run, layer)
    if block.activations_gpu < 1 and hardware.has_gpu and block.states is None:
        hidden = round(2 * block.sequences * job.width * (1 - block.activations_gpu))
        there = {layer.scratch: hidden}
        trace.append(Event("decode", step, "hidden", "h2d", "act", there, {}, hidden))
        trace.append(Event("decode", step, "hidden", "d2h", "act", {}, there, hidden))


def _calls(
    trace: Trace, step: int, run: tuple[Sizes, Hardware, Block], kind: str, seconds: float
) -> None:
    """Calls of a step of one batch, which a GPU waits for, as operations at its peak."""
    job, hardware, block = run
    at_peak = block.batches * seconds / job.layers * hardware.gpu.flops_per_s
    trace.append(Event("decode", step, "compute", "gpu", kind, {}, {}, 0, at_peak))


def _products(trace: Trace, step: int, run: tuple[Sizes, Hardware, Block], layer: _Layer) -> None:
    """Of CPUs over weights where they lie, then over the copies near them."""
    job, _, block = run
    engine = job.engine
    flops = 2.0 * block.params_cpu * block.sequences / job.layers
    if layer.weights_cpu or layer.near_copies:
        flops *= engine.attention_flops_per_core / engine.products_flops_per_core
    if layer.weights_cpu:
        times = block.batches * block.cpu_read_share
        read = {node: round(nbytes * times) for node, nbytes in layer.weights_cpu.items()}
        paced = _paced(run, read, engine.products_share)
        done = paced + (0.0 if layer.near_copies else flops)
        trace.append(Event("decode", step, "compute", "cpu", "weights", read, {}, 0, done))
    if read := dict(layer.near_copies):
        done = flops + _paced(run, read, engine.products_share, near=True)
        trace.append(Event("decode", step, "compute", "cpu", COPIES, read, {}, 0, done))


def _attention(trace: Trace, step: int, run: tuple[Sizes, Hardware, Block], layer: _Layer) -> None:
    """Of CPUs over the KV that is off the GPU."""
    job, _, block = run
    tokens = job.mean_kv_tokens
    read = _scaled(layer.kv_token, tokens)
    if layer.kv_token_drive:
        staged = round(layer.kv_token_drive * tokens)
        trace.append(Event("decode", step, "load_cache", "nvme", "kv", {}, {layer.stage: staged}))
        read[layer.stage] = read.get(layer.stage, 0) + staged
    if read and not job.engine.workspace_bytes_per_element:
        flops = 4 * tokens * job.query_width * block.sequences * (1 - block.kv_gpu)
        for part in _in_turn(read, layer.striped_kv):
            own = flops * sum(part.values()) / sum(read.values())
            own = max(own, _paced(run, part, job.engine.attention_share))
            trace.append(Event("decode", step, "compute", "cpu", "kv", part, {}, 0, own))
    elif read:
        workspace = {layer.scratch: 2 * sum(read.values())}  # half precision becomes single
        queue = "load_cache" if job.engine.overlaps else "compute"
        for part in _in_turn(read, layer.striped_kv):
            filled = {layer.scratch: 2 * sum(part.values())}
            trace.append(Event("decode", step, queue, "cpu", "kv", part, filled))
        elements = sum(read.values()) / 2
        trace.append(
            Event("decode", step, "compute", "cpu", "workspace", workspace, {}, 0, 2.0 * elements)
        )
