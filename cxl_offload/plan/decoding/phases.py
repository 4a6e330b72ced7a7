"""Decoding over several host nodes: seconds of prefill and of a decoded token.

FlexGen's cost model (Sheng et al., FlexGen, ICML 2023, section 4.3; the package's
experimental/cost_model.py) knows one kind of host memory. Here every host stream is charged to the
nodes its pages lie on, and what its model omits is added: bandwidth of the nodes under CPU
attention, its workspace, and the latency of the node that KV is stored to. What lies on nodes in
whole tensors or whole sequences is read from one node after the other, ``sum(X_i / B_i)``; what is
striped from all at once, ``max(f_i / B_i)`` a byte.

One decoded token, all layers::

    T_gen = weights over the link + max(hidden to host, drive reads, GPU work + CPU attention)

and the prefill of a block::

    T_pre = max(weights over the link + drive reads, KV to host + drive writes, GPU work)

Weights that CPUs multiply where they lie are read once for every GPU batch, and do not cross the
link but in a prefill. Where there is no GPU, CPUs do all of it, and a block is one batch.

Valid for attention of host-resident KV on the CPU, weights streamed for every layer and token, and
the overlap of one layer. Kernel launches, the embedding and sampling are left out, but where CPUs
compute at measured rates (``row_s``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cxl_offload.plan.decoding.block import Block
from cxl_offload.plan.decoding.copied_states import busy_seconds, loaded_seconds, stored_seconds
from cxl_offload.plan.decoding.engine import kv_store_costs
from cxl_offload.plan.decoding.sizes import Sizes
from cxl_offload.plan.equations.copies import path_bytes_per_s
from cxl_offload.plan.equations.interleave import bandwidth_bound
from cxl_offload.plan.gpu import LAYER_S, roofline_seconds
from cxl_offload.plan.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of the prefill of a block and of one decoded token, and the terms they are made of.

    The prefill is the largest of its terms. A decoded token is ``weights`` and ``hidden loads``
    one after the other, then (or beside them, with an engine that overlaps) the largest of the
    other terms.
    """

    prefill_s: float
    decode_token_s: float
    prefill_terms: Mapping[str, float]
    decode_terms: Mapping[str, float]
    total_s: float
    tokens_per_s: float


def decode_gpu_seconds(
    job: Sizes,
    hardware: Hardware,
    gpu_batch: int,
    *,
    params_cpu: float = 0.0,
    cpu_bytes: float = 0.0,
    unread: float = 0.0,
) -> float:
    """GPU work of one decoded token of one GPU batch, attention and what CPUs do left out.

    Of ``unread`` bytes on the GPU the batch reads nothing.

    A GPU is never done before the calls that start its work; without a GPU it is 0.
    """
    flops = 2 * (job.params - params_cpu) * gpu_batch
    nbytes = job.weight_bytes - cpu_bytes - unread
    gpu = hardware.gpu
    if job.engine.in_turn and hardware.has_gpu:
        arithmetic = flops / gpu.products_flops_per_s
        return nbytes / gpu.memory_bytes_per_s + arithmetic + job.layers * job.engine.layer_s
    seconds = roofline_seconds(gpu, flops=flops, nbytes=nbytes)
    if not hardware.has_gpu:
        return seconds
    return max(seconds + job.layers * LAYER_S, job.layers * job.engine.layer_s)


def joined_bytes(job: Sizes, tokens: float) -> float:
    """What the GPU moves beside reading its part of a cache that CPUs attend to with it."""
    return tokens * job.kv_elements_per_token * job.engine.joined_bytes_per_element


def joined_calls_seconds(job: Sizes) -> float:
    """Calls of a step of one batch for a cache that is on the GPU in part, before CPUs attend."""
    return job.layers * job.engine.joined_calls * job.engine.call_s


def states_calls_seconds(job: Sizes) -> float:
    """Calls of a step of one batch whose hidden states come from a tier and go back."""
    return job.layers * job.engine.states_calls * job.engine.call_s


def between_products_seconds(job: Sizes, hardware: Hardware) -> float:
    """What CPUs do in one step beside its rows, where there is no GPU to do it."""
    return 0.0 if hardware.has_gpu else job.layers * job.engine.layer_s + job.engine.step_s


def prefill_between_seconds(job: Sizes, hardware: Hardware) -> float:
    """The same of the step of a prompt, and what comes before it."""
    return 0.0 if hardware.has_gpu else between_products_seconds(job, hardware) + job.engine.start_s


def decode_rows_seconds(job: Sizes, hardware: Hardware, sequences: float) -> float:
    """What the rows of one decode step take beside products, where there is no GPU to do it."""
    return 0.0 if hardware.has_gpu else sequences * job.row_s(job.engine.decode_rows)


def cpu_products_seconds(job: Sizes, hardware: Hardware, block: Block) -> float:
    """CPU work of one decoded token of every sequence on weights where they lie.

    torch brings a matrix into the order of its kernel before it multiplies few rows by it, so that
    bytes and arithmetic take their time one after the other (measured).
    """
    if not sum(block.weights_cpu) + block.weights_copied:
        return 0.0
    engine, flops = job.engine, 2 * block.params_cpu * block.sequences
    memory = _cpu_weights_seconds(hardware, block) / engine.products_share * block.cpu_read_share
    if block.weights_copied:
        memory += block.weights_copied / hardware.near_bytes_per_s / engine.products_share
    arithmetic = flops / (hardware.cores * engine.products_flops_per_core)
    return block.batches * memory + arithmetic


def _cpu_weights_seconds(hardware: Hardware, block: Block) -> float:
    """CPUs read the weights that they multiply, once."""
    return _cpu_seconds(hardware, block.weights_cpu, block.cpu_shares)


def _cpu_seconds(
    hardware: Hardware, nbytes: Sequence[float], shares: Sequence[float] | None
) -> float:
    """CPUs read bytes on the nodes; each socket its part of them, across the links too."""
    if not sum(nbytes):
        return 0.0
    seconds = _host_seconds(nbytes, hardware.even_rates, shares)
    links = (sum(nbytes[at] * cost for at, cost in costs.items()) for costs in hardware.link_costs)
    return max((seconds, *links))


def first_copy_rate(hardware: Hardware) -> float:
    """Bytes/s of what reads the first copy only: torch, which computes prompts."""
    return hardware.even_rates[hardware.copy_nodes[0]]


def _host_seconds(
    nbytes: Sequence[float], rates: Sequence[float], shares: Sequence[float] | None
) -> float:
    """Bytes from one node after the other, or from all at once where they are striped."""
    if shares is None:
        return sum(each / rate for each, rate in zip(nbytes, rates, strict=True))
    return sum(nbytes) / bandwidth_bound(rates, shares)


def prefill_gpu_seconds(job: Sizes, hardware: Hardware, sequences: int) -> float:
    """GPU work of the prefill of a block, never less than reading the weights once."""
    return roofline_seconds(
        hardware.gpu,
        flops=prefill_flops(job, sequences),
        nbytes=job.weight_bytes,
    )


def prefill_flops(job: Sizes, sequences: int) -> float:
    """Arithmetic of a prefill: the weights' products and the attention scores."""
    return _products_flops(job, sequences) + _scores_flops(job, sequences)


def _products_flops(job: Sizes, sequences: int) -> float:
    return 2.0 * sequences * ((job.params - job.last_params) * job.prompt + job.last_params)


def _scores_flops(job: Sizes, sequences: int) -> float:
    return 4.0 * sequences * job.prompt**2 * job.query_width * job.layers


def prefill_cpu_seconds(job: Sizes, hardware: Hardware, sequences: int) -> float:
    """What CPUs compute for prompts, apart from reading weights: products, scores and rows."""
    engine, cores = job.engine, hardware.cores
    scores = engine.prompt_attention_flops_per_core or engine.prefill_flops_per_core
    seconds = _products_flops(job, sequences) / (cores * engine.prefill_flops_per_core)
    seconds += _scores_flops(job, sequences) / (cores * scores)
    return seconds + sequences * job.prompt * job.row_s(engine.prompt_rows)


def _link_seconds(hardware: Hardware, block: Block) -> float:
    """All weights off the GPU over the link, once; what is on the drive is staged on a node."""
    link = hardware.link_bytes_per_s
    rates = [node.copy_bytes_per_s for node in hardware.nodes]
    seconds = block.weights_drive / min(link, rates[0])
    if block.weight_shares is None:
        parts = zip(block.weights_host, rates, strict=True)
        return seconds + sum(nbytes / min(link, rate) for nbytes, rate in parts)
    return seconds + sum(block.weights_host) / path_bytes_per_s(link, rates, block.weight_shares)


def _prefill_link_seconds(hardware: Hardware, block: Block) -> float:
    """A prefill has enough rows for the GPU: what CPUs multiply when decoding crosses too."""
    seconds, link = _link_seconds(hardware, block), hardware.link_bytes_per_s
    if not sum(block.weights_cpu) or not hardware.has_gpu:
        return seconds
    rates = [min(link, node.copy_bytes_per_s) for node in hardware.nodes]
    alone = _host_seconds(block.weights_cpu, rates, block.cpu_shares)
    return seconds + max(alone, sum(block.weights_cpu) / link)


def _kv_read_seconds(hardware: Hardware, block: Block, kv_bytes: float) -> float:
    """KV that is off the GPU, read by the CPU; the first node stages what is on the drive."""
    seconds = kv_bytes * block.kv_drive / hardware.even_rates[0]
    return seconds + kv_bytes * _cpu_seconds(hardware, block.kv_host, block.kv_shares)


def _drive_seconds(nbytes: float, bytes_per_s: float) -> float:
    if nbytes and not bytes_per_s:
        raise ValueError("bytes on nvme, but neither the machine nor the inputs give its rate")
    return nbytes / bytes_per_s if nbytes else 0.0


def _with_states(
    job: Sizes, hardware: Hardware, block: Block, terms: dict[str, float]
) -> dict[str, float]:
    """Terms of a prefill whose hidden states cross the link too, both ways, beside weights and KV.

    Node by node all three are charged to its memory.
    """
    states = block.states
    if states is None:
        return terms
    kv = block.sequences * job.prompt * job.kv_bytes_per_token
    beside = [
        weights + kv * share
        for weights, share in zip(block.weights_host, block.kv_host, strict=True)
    ]
    loaded = loaded_seconds(hardware, block.weights_host, states, job.prompt)
    stored = stored_seconds(hardware, states, job.prompt)
    return {
        "weights and hidden states over the link": loaded,
        "KV and hidden stores": terms["KV stores"] + stored,
        "GPU work": terms["GPU work"],
        "memory of the busiest node": busy_seconds(hardware, beside, states, job.prompt),
    }


def _prefill_terms(job: Sizes, hardware: Hardware, block: Block) -> dict[str, float]:
    engine = job.engine
    weights = _prefill_link_seconds(hardware, block)
    weights += _drive_seconds(block.weights_drive, hardware.drive_read_bytes_per_s)
    kv = block.sequences * job.prompt * job.kv_bytes_per_token
    costs = kv_store_costs(engine, hardware)
    on_host = sum(share * cost for share, cost in zip(block.kv_host, costs, strict=True))
    stores = kv * (on_host + block.kv_drive * costs[0])
    written = min(hardware.drive_write_bytes_per_s, engine.kv_drive_store_bytes_per_s)
    terms = {
        "weights over the link": weights,
        "KV stores": stores + _drive_seconds(kv * block.kv_drive, written),
        "GPU work": prefill_gpu_seconds(job, hardware, block.sequences),
    }
    if not hardware.has_gpu:
        seconds = prefill_cpu_seconds(job, hardware, block.sequences)
        read = _cpu_weights_seconds(hardware, block)
        if block.weights_copied:
            read += block.weights_copied / first_copy_rate(hardware)
        seconds += read / engine.products_share
        terms["CPU work"] = seconds + prefill_between_seconds(job, hardware)
    return _with_states(job, hardware, block, terms)


def _decode_terms(job: Sizes, hardware: Hardware, block: Block) -> dict[str, float]:
    engine, off_gpu = job.engine, 1 - block.kv_gpu
    tokens = block.sequences * job.mean_kv_tokens
    kv = tokens * job.kv_bytes_per_token
    work = block.batches * decode_gpu_seconds(
        job,
        hardware,
        block.gpu_batch,
        params_cpu=block.params_cpu,
        cpu_bytes=sum(block.weights_cpu),
        unread=block.unread,
    )
    work += kv * block.kv_gpu / hardware.gpu.memory_bytes_per_s
    if block.joins:
        moved = joined_bytes(job, tokens * block.kv_gpu)
        work += moved / hardware.gpu.memory_bytes_per_s
        work += block.batches * joined_calls_seconds(job)
    if block.states is not None:
        work += block.batches * states_calls_seconds(job)
    work += cpu_products_seconds(job, hardware, block)
    work += between_products_seconds(job, hardware)
    work += decode_rows_seconds(job, hardware, block.sequences)
    flops = 4 * tokens * off_gpu * job.query_width * job.layers
    arithmetic = flops / (hardware.cores * engine.attention_flops_per_core)
    elements = tokens * off_gpu * job.kv_elements_per_token
    scratch = hardware.nodes[block.scratch].read_bytes_per_s
    memory = _kv_read_seconds(hardware, block, kv) / engine.attention_share
    memory += elements * engine.workspace_bytes_per_element / scratch
    drive = block.weights_drive + kv * block.kv_drive
    return {
        "weights over the link": _link_seconds(hardware, block),
        **_hidden_terms(job, hardware, block),
        "drive reads": _drive_seconds(drive, hardware.drive_read_bytes_per_s),
        **_work_terms(block, work, arithmetic=arithmetic, memory=memory),
    }


def _hidden_terms(job: Sizes, hardware: Hardware, block: Block) -> dict[str, float]:
    """What hidden states of a decoded token add to the weights on the link, and their way back."""
    if block.states is not None:
        both = loaded_seconds(hardware, block.weights_host, block.states, 1)
        # Weights are charged by the shares of their stripes, which tensors have only nearly.
        loads = max(0.0, both - _link_seconds(hardware, block))
        stores = stored_seconds(hardware, block.states, 1)
        return {"hidden loads": loads, "hidden stores": stores}
    hidden = block.sequences * job.layers * job.width * job.activation_bytes
    hidden *= 1 - block.activations_gpu
    link = hardware.link_bytes_per_s
    stored = hidden / min(job.engine.hidden_store_bytes_per_s, link)
    return {"hidden loads": hidden / link, "hidden stores": stored}


def _work_terms(block: Block, work: float, *, arithmetic: float, memory: float) -> dict[str, float]:
    """The GPU's work with attention of CPUs, which there is none of where it has all of the KV."""
    if block.kv_gpu >= 1:
        return {f"GPU work{' + CPU products' * bool(sum(block.weights_cpu))}": work}
    return {
        "GPU work + CPU attention (arithmetic)": work + arithmetic,
        "GPU work + CPU attention (memory)": work + memory,
    }


def _named(hardware: Hardware, terms: dict[str, float]) -> dict[str, float]:
    """Terms; without a GPU none is called after one."""
    if hardware.has_gpu:
        return terms
    return {name.replace("GPU work", "CPU products"): each for name, each in terms.items()}


def _shared_seconds(job: Sizes, hardware: Hardware, block: Block) -> float:
    """The busiest node, where copies and attention want it at the same time."""
    kv = block.sequences * job.mean_kv_tokens * job.kv_bytes_per_token
    busy = []
    for at in range(len(hardware.nodes)):
        nbytes = block.weights_host[at] + kv * block.kv_host[at]
        if block.weights_cpu:
            nbytes += block.batches * block.weights_cpu[at] * block.cpu_read_share
        if at == 0:  # what is on the drive is staged there
            nbytes += block.weights_drive + kv * block.kv_drive
        busy.append(nbytes)
    return busy_seconds(hardware, busy, block.states, 1)


def phases_of_block(job: Sizes, hardware: Hardware, block: Block) -> Phases:
    """What the equations predict: one prefill, then ``generated - 1`` decode steps.

    KV grows linearly, so a decode step is charged the mean length, prompt + generated / 2, as in
    FlexGen's model.

    Raises
    ------
    ValueError
        Bytes on a drive of unknown rate.
    """
    prefill = _prefill_terms(job, hardware, block)
    decode = _decode_terms(job, hardware, block)
    in_turn = decode["weights over the link"] + decode["hidden loads"]
    if job.engine.overlaps:
        decode["memory of the busiest node"] = _shared_seconds(job, hardware, block)
    rest = max(list(decode.values())[2:])
    token = max(in_turn, rest) if job.engine.overlaps else in_turn + rest
    total = max(prefill.values()) + (job.generated - 1) * token
    return Phases(
        prefill_s=max(prefill.values()),
        decode_token_s=token,
        prefill_terms=prefill,
        decode_terms=_named(hardware, decode),
        total_s=total,
        tokens_per_s=block.sequences * job.generated / total,
    )
