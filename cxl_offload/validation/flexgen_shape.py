"""FlexGen with a model of published shape and shares of it on tiers, for the planner's equations.

Published runs print a model's shape, a batch, and which tiers pages were interleaved over; weights
and KV that are not on the GPU are then spread alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cxl_offload.plan.decoding.block import Block
from cxl_offload.plan.decoding.engine import STOCK, EngineRates, RowCosts
from cxl_offload.plan.decoding.phases import phases_of_block
from cxl_offload.plan.hardware import LOCAL, Hardware, HostNode
from cxl_offload.plan.machine_rates import MachineRates
from cxl_offload.validation.footprint import (
    ElementBytes,
    Lengths,
    LlmShape,
    kv_bytes_per_token,
    kv_elements_per_token,
    weight_bytes_total,
)


@dataclass(frozen=True, slots=True)
class ShapeOnTiers:
    """Where a batch lives.

    ``host_shares`` (one a tier of the machine) and ``drive_share`` hold for weights that are not
    on the GPU and for KV that is not; they sum to one.
    """

    batch: int
    host_shares: tuple[float, ...]
    drive_share: float = 0.0
    weights_gpu_fraction: float = 0.0
    kv_gpu_fraction: float = 0.0
    activations_gpu_fraction: float = 0.0
    gpu_batch: int | None = None


@dataclass(frozen=True, slots=True)
class Throughput:
    """Prefill in sequences a second, decode and overall in generated tokens a second."""

    prefill: float
    decode: float
    overall: float


@dataclass(frozen=True, slots=True)
class _ShapeSizes:
    """A shape as the equations take a model (:class:`cxl_offload.plan.decoding.sizes.Sizes`)."""

    params: float
    layers: int
    width: int
    prompt: int
    generated: int
    weight_bytes: float
    kv_bytes_per_token: float
    kv_elements_per_token: float
    activation_bytes: float
    engine: EngineRates = STOCK
    last_params: float = 0.0

    @property
    def query_width(self) -> int:
        """As wide as a layer."""
        return self.width

    @property
    def mean_kv_tokens(self) -> float:
        """As in FlexGen's cost model."""
        return self.prompt + self.generated / 2

    def row_s(self, costs: RowCosts) -> float:
        """None: a GPU computes."""
        return 0.0


def hardware_of_tiers(
    rates: MachineRates, tiers: Sequence[str], *, drive_read_bytes_per_s: float | None = None
) -> Hardware:
    """A machine with whole tiers for nodes, in this order; room is the caller's matter.

    ``drive_read_bytes_per_s`` stands in for the machine's drive.
    """
    local, *latencies = rates.latencies_ns([LOCAL, *tiers])
    drive = rates.machine.drives[0] if rates.machine.drives else None
    read = drive_read_bytes_per_s or (drive.read_bandwidth_bytes_per_s if drive else None) or 0.0
    write = (drive.write_bandwidth_bytes_per_s if drive else None) or read
    nodes = [
        HostNode(
            name=tier,
            tier=tier,
            node=at,
            usable_bytes=0.0,
            read_bytes_per_s=rates.read_bytes_per_s(tier),
            latency_ns=latency,
            copy_bytes_per_s=rates.copy_bytes_per_s(tier),
        )
        for at, (tier, latency) in enumerate(zip(tiers, latencies, strict=True))
    ]
    return Hardware(
        machine=rates.machine.name,
        nodes=tuple(nodes),
        link_bytes_per_s=rates.link_bytes_per_s(),
        local_latency_ns=local,
        gpu=rates.gpu_rates(),
        gpu_memory_bytes=0.0,
        gpu_usable_bytes=0.0,
        cores=rates.cores(),
        drive_read_bytes_per_s=read,
        drive_write_bytes_per_s=min(write, read),
    )


def _block(llm: LlmShape, sizes: ElementBytes, place: ShapeOnTiers) -> Block:
    off_gpu = weight_bytes_total(llm, sizes) * (1 - place.weights_gpu_fraction)
    kv_off_gpu = 1 - place.kv_gpu_fraction
    host = sum(place.host_shares)
    shares = tuple(share / host for share in place.host_shares)
    gpu_batch = place.gpu_batch or place.batch
    return Block(
        sequences=place.batch,
        batches=-(-place.batch // gpu_batch),
        gpu_batch=gpu_batch,
        weights_drive=off_gpu * place.drive_share,
        weights_host=[off_gpu * share for share in place.host_shares],
        weight_shares=shares,
        kv_drive=kv_off_gpu * place.drive_share,
        kv_host=[kv_off_gpu * share for share in place.host_shares],
        kv_gpu=place.kv_gpu_fraction,
        kv_shares=shares,
        activations_gpu=place.activations_gpu_fraction,
    )


def throughput(
    hardware: Hardware,
    llm: LlmShape,
    sizes: ElementBytes,
    lengths: Lengths,
    place: ShapeOnTiers,
) -> Throughput:
    """Throughput of a batch, by the equations of :mod:`cxl_offload.plan.decoding.phases`.

    Raises
    ------
    ValueError
        An empty batch, sequences too short for the phase asked for, or bytes on a drive of
        unknown rate.
    """
    if place.batch < 1 or lengths.prompt < 1 or lengths.generated < 2:
        raise ValueError(
            f"batch {place.batch}, prompt {lengths.prompt}, generated {lengths.generated}: need a "
            "batch and a prompt >= 1 and at least 2 generated tokens"
        )
    job = _ShapeSizes(
        params=llm.params,
        layers=llm.layers,
        width=llm.width,
        prompt=lengths.prompt,
        generated=lengths.generated,
        weight_bytes=weight_bytes_total(llm, sizes),
        kv_bytes_per_token=kv_bytes_per_token(llm, sizes),
        kv_elements_per_token=kv_elements_per_token(llm),
        activation_bytes=sizes.activations,
    )
    found = phases_of_block(job, hardware, _block(llm, sizes, place))
    return Throughput(
        prefill=place.batch / found.prefill_s,
        decode=place.batch / found.decode_token_s,
        overall=found.tokens_per_s,
    )
