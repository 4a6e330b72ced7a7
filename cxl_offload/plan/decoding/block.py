"""Sequences that are decoded together, and where their bytes are, as the equations take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cxl_offload.plan.decoding.copied_states import CopiedStates


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Sequences under way together, and where their bytes are.

    Attributes
    ----------
    sequences, batches, gpu_batch
        All of them, in how many GPU batches, and rows of one of those.
    weights_drive, weights_host
        Bytes; the host's one a node.
    weight_shares
        Shares of the nodes in striped weights; None: whole tensors.
    kv_drive, kv_host, kv_gpu
        Shares of the KV cache; together 1.
    kv_shares
        As ``weight_shares``, of KV.
    activations_gpu
        Share of the hidden states on the GPU; ``states`` says more of those that are not.
    scratch
        Index of the node of the workspace.
    weights_cpu, cpu_shares
        As ``weights_host`` and ``weight_shares``, of weights that CPUs multiply where they lie.
    params_cpu
        Numbers in those that a token meets.
    cpu_read_share
        Share of their bytes that one decode step of a batch reads: of experts, those asked for.
    unread
        Bytes of the other weights that it does not read.
    weights_copied
        Bytes of weights that CPUs multiply and that each socket has a copy of; beside those of
        ``weights_cpu``.
    states
        Hidden states of all rows that lie in host memory and are copied by the copy engine; None:
        there are none, or an engine of its own takes them between GPU and ``scratch``.
    """

    sequences: int
    batches: int
    gpu_batch: int
    weights_drive: float
    weights_host: Sequence[float]
    weight_shares: Sequence[float] | None
    kv_drive: float
    kv_host: Sequence[float]
    kv_gpu: float
    kv_shares: Sequence[float] | None
    activations_gpu: float
    scratch: int = 0
    weights_cpu: Sequence[float] = ()
    cpu_shares: Sequence[float] | None = None
    params_cpu: float = 0.0
    cpu_read_share: float = 1.0
    unread: float = 0.0
    weights_copied: float = 0.0
    states: CopiedStates | None = None

    @property
    def joins(self) -> bool:
        """Whether the GPU attends to a part of the cache and CPUs to another."""
        return 0 < self.kv_gpu < 1
