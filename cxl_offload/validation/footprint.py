"""Bytes that inference needs: weights, KV cache and activations, and the batch that fits.

Source: Wang et al., Performance Characterization of CXL Memory, Table II; the formula reproduces
its six printed footprints within 0.5 % (read as GiB). Valid for dense decoder models with
standard or grouped-query attention; runtimes add workspaces (see ``flexgen.model``).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from cxl_offload.plan.exact import exact


@dataclass(frozen=True, slots=True)
class LlmShape:
    """A decoder: parameters, layers, model width, attention heads, heads that keep K and V."""

    params: float
    layers: int
    width: int
    heads: int
    kv_heads: int

    def __post_init__(self) -> None:
        numbers = (self.params, self.layers, self.width, self.heads, self.kv_heads)
        if min(numbers) <= 0 or self.kv_heads > self.heads:
            raise ValueError(f"llm {self}: all above 0, and kv_heads <= heads")


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes an element of weights, KV cache and activations (0.5 is 4 bit)."""

    weights: float
    kv: float
    activations: float

    def __post_init__(self) -> None:
        if min(self.weights, self.kv, self.activations) < 0:
            raise ValueError(f"element bytes {self}: numbers >= 0")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a prompt and tokens generated after it."""

    prompt: int
    generated: int

    def __post_init__(self) -> None:
        if min(self.prompt, self.generated) < 0:
            raise ValueError(f"lengths {self}: numbers >= 0")

    @property
    def total(self) -> int:
        """Tokens of one full sequence."""
        return self.prompt + self.generated


def weight_bytes_total(llm: LlmShape, sizes: ElementBytes) -> float:
    """Bytes of all weights."""
    return llm.params * sizes.weights


def kv_elements_per_token(llm: LlmShape) -> float:
    """Numbers in K and V of one token, all layers: ``2 * layers * width * kv_heads / heads``."""
    return 2 * llm.layers * llm.width * llm.kv_heads / llm.heads


def kv_bytes_per_token(llm: LlmShape, sizes: ElementBytes) -> float:
    """K and V of one token over all layers, in bytes."""
    return kv_elements_per_token(llm) * sizes.kv


def kv_bytes_per_sequence(llm: LlmShape, sizes: ElementBytes, lengths: Lengths) -> float:
    """K and V of one full sequence."""
    return kv_bytes_per_token(llm, sizes) * lengths.total


def activation_bytes_per_sequence(llm: LlmShape, sizes: ElementBytes, lengths: Lengths) -> float:
    """One vector of ``width`` a token of a full sequence."""
    return lengths.total * llm.width * sizes.activations


def total_bytes(llm: LlmShape, sizes: ElementBytes, lengths: Lengths, *, batch: float) -> float:
    """Weights, KV cache and activations of ``batch`` full sequences, host and GPU together."""
    per_sequence = kv_bytes_per_sequence(llm, sizes, lengths)
    per_sequence += activation_bytes_per_sequence(llm, sizes, lengths)
    return weight_bytes_total(llm, sizes) + batch * per_sequence


def host_bytes(
    llm: LlmShape, sizes: ElementBytes, lengths: Lengths, *, batch: float, kv_gpu_fraction: float
) -> float:
    """The same less the share of the KV cache that the GPU holds."""
    on_gpu = batch * kv_bytes_per_sequence(llm, sizes, lengths) * kv_gpu_fraction
    return total_bytes(llm, sizes, lengths, batch=batch) - on_gpu


def max_batch(
    llm: LlmShape,
    sizes: ElementBytes,
    lengths: Lengths,
    *,
    host_capacity_bytes: Fraction,
    gpu_kv_bytes: Fraction,
) -> int:
    """Largest whole number of sequences b that the host holds; 0 when none fits.

    ``weights + activations(b) + max(0, KV(b) - gpu_kv) <= host_capacity``, compared exactly.

    Raises
    ------
    ValueError
        A sequence takes no bytes, so that any number fits.
    """
    kv = 2 * exact(sizes.kv) * llm.layers * llm.width * llm.kv_heads / llm.heads * lengths.total
    activations = exact(sizes.activations) * lengths.total * llm.width
    room = host_capacity_bytes - exact(llm.params) * exact(sizes.weights)
    if room < 0:
        return 0
    if kv + activations == 0:
        raise ValueError("max batch: a sequence of no bytes fits any number of times")
    both_bound = (room + gpu_kv_bytes) / (kv + activations)
    if activations == 0:
        return int(both_bound)
    return int(min(both_bound, room / activations))
