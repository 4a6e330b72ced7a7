"""vLLM decode with part of the weights in host memory.

Offloaded weights cross the link in every step and are dropped after use, so the GPU memory they
leave is KV cache: more offload, more sequences at once, longer steps. The copies are made just
before use on the compute stream and do not overlap with it (vLLM's weight offload without
prefetch), so a step is copy plus compute.

Source: Wang et al., Hitchhiker's Guide to CXL Memory, 6.1.5 and Table 5 (LLaMA3-70B, H100 and
DIMM: within 7 % at all four sizes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cxl_offload.plan.equations.experts import asked_share
from cxl_offload.plan.gpu import GpuRates, roofline_seconds
from cxl_offload.renamed import old_names


@dataclass(frozen=True, slots=True)
class WeightOffload:
    """A model on one GPU with a host link, or one GPU's part of it; sizes in bytes.

    ``mean_tokens_per_sequence`` is the KV that a running sequence holds on average and
    ``max_running_sequences`` the scheduler's cap. ``flops_per_token`` is the arithmetic of one
    decoded token, two operations a parameter where it is 0; ``prefill_flops`` that of one prompt,
    of which ``tokens_per_sequence`` tokens are generated (0: decode alone is asked for). Where GPUs
    share a model, they send each other something for every decoded token and for every prompt.
    ``expert_bytes`` of the weights are experts, of which a token asks for the share ``expert_met``;
    of ``table_bytes`` tokens look up a row each. ``step_s`` is what a step takes beside its bytes
    and its arithmetic, ``sequence_s`` what each running sequence adds to that, and
    ``request_s`` what each request costs once. More than ``most_by_prompts`` do not run, since a
    step has no room for the prompts that would take their places.
    """

    params: float
    weight_bytes: float
    kv_bytes_per_token: float
    gpu_memory_bytes: float
    usable_fraction: float
    gpu_reserved_bytes: float
    gpu: GpuRates
    mean_tokens_per_sequence: float
    max_running_sequences: float
    link_bytes_per_s: float
    flops_per_token: float = 0.0
    prefill_flops: float = 0.0
    tokens_per_sequence: float = 0.0
    exchange_seconds_per_token: float = 0.0
    exchange_seconds_per_prompt: float = 0.0
    expert_bytes: float = 0.0
    expert_met: float = 1.0
    table_bytes: float = 0.0
    step_s: float = 0.0
    sequence_s: float = 0.0
    request_s: float = 0.0
    most_by_prompts: float = math.inf

    def read_bytes(self, sequences: float) -> float:
        """Weights that one decode step of so many sequences reads."""
        return self.weight_bytes - self.table_bytes - self.unasked_bytes(sequences)

    def unasked_bytes(self, sequences: float) -> float:
        """Experts that none of so many sequences asks for."""
        return self.expert_bytes * (1 - asked_share(self.expert_met, sequences))

    def beside_s(self, sequences: float) -> float:
        """Seconds of a step of so many sequences beside its bytes and its arithmetic."""
        return self.step_s + sequences * self.sequence_s

    def gpu_seconds(self, sequences: float, kv_tokens: float) -> float:
        """GPU work of one decode step: weights and the KV of so many tokens are read once."""
        flops = (self.flops_per_token or 2 * self.params) * sequences
        nbytes = self.read_bytes(sequences) + kv_tokens * self.kv_bytes_per_token
        return roofline_seconds(self.gpu, flops=flops, nbytes=nbytes) + self.beside_s(sequences)


def kv_room_bytes(case: WeightOffload, offload_bytes: float) -> float:
    """Bytes left for KV: usable GPU memory less resident weights and workspace, at least 0."""
    resident = case.weight_bytes - offload_bytes
    usable = case.gpu_memory_bytes * case.usable_fraction
    return max(0.0, usable - resident - case.gpu_reserved_bytes)


def running_sequences(case: WeightOffload, offload_bytes: float) -> float:
    """Sequences decoded at once, on average: KV room over a sequence's KV, up to the cap."""
    per_sequence = case.kv_bytes_per_token * case.mean_tokens_per_sequence
    most = min(case.max_running_sequences, case.most_by_prompts)
    return min(kv_room_bytes(case, offload_bytes) / per_sequence, most)


def copy_seconds_per_step(case: WeightOffload, offload_bytes: float) -> float:
    """Seconds of a step spent in weight copies: every offloaded byte once."""
    return offload_bytes / case.link_bytes_per_s


def compute_seconds_per_step(case: WeightOffload, offload_bytes: float) -> float:
    """Seconds of GPU work in a step of the running sequences."""
    sequences = running_sequences(case, offload_bytes)
    return case.gpu_seconds(sequences, sequences * case.mean_tokens_per_sequence)


def prefill_seconds_per_step(case: WeightOffload, offload_bytes: float) -> float:
    """Seconds of a step in which prompts are computed: as many begin as end.

    Of ``n`` running sequences ``n / generated`` end in a step and as many prompts take their
    place, in the same step (vLLM's chunked prefill), so their weights are not copied again.
    """
    begun = _begun_per_step(case, offload_bytes)
    return begun * (case.prefill_flops / case.gpu.products_flops_per_s + case.request_s)


def exchange_seconds_per_step(case: WeightOffload, offload_bytes: float) -> float:
    """Seconds of a step in which GPUs send each other what they computed, prompts included."""
    decoded = running_sequences(case, offload_bytes) * case.exchange_seconds_per_token
    return decoded + _begun_per_step(case, offload_bytes) * case.exchange_seconds_per_prompt


def _begun_per_step(case: WeightOffload, offload_bytes: float) -> float:
    if not case.tokens_per_sequence:
        return 0.0
    return running_sequences(case, offload_bytes) / case.tokens_per_sequence


def step_seconds(case: WeightOffload, offload_bytes: float) -> float:
    """Seconds of one step: copies, prefill, decode and exchange one after the other."""
    if not 0 <= offload_bytes <= case.weight_bytes:
        raise ValueError(
            f"offload {offload_bytes / 2**30:.6g} GiB of {case.weight_bytes / 2**30:.6g} GiB of "
            "weights: need 0 <= offload <= weights"
        )
    copies = copy_seconds_per_step(case, offload_bytes)
    prefill = prefill_seconds_per_step(case, offload_bytes)
    exchange = exchange_seconds_per_step(case, offload_bytes)
    return copies + prefill + compute_seconds_per_step(case, offload_bytes) + exchange


def tokens_per_s(case: WeightOffload, offload_bytes: float) -> float:
    """Decoded tokens a second; 0 where no KV fits beside the resident weights."""
    return running_sequences(case, offload_bytes) / step_seconds(case, offload_bytes)


__getattr__ = old_names(__name__)
