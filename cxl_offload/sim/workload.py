"""What a transformer's tensors and layers amount to, and where each kind of them lives.

:mod:`cxl_offload.sim.training` turns these into a trace, so that a placement can be replayed
without running a framework, and without the planner's equations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from cxl_offload.errors import ConfigError
from cxl_offload.renamed import old_names

_CLOSE = 1e-9


class PlacedBytes(NamedTuple):
    """Bytes of one tensor in every place; they add up to the tensor's."""

    gpu: int
    nodes: dict[int, int]
    drive: int

    def on_host(self, stage: int) -> dict[int, int]:
        """Node -> bytes once what the drive holds has been loaded into node ``stage``."""
        found = {node: count for node, count in self.nodes.items() if count}
        if self.drive:
            found[stage] = found.get(stage, 0) + self.drive
        return found


@dataclass(frozen=True, slots=True)
class TensorHome:
    """Shares of a kind of tensor: in GPU memory, on nodes, on the drive; together 1."""

    gpu: float = 0.0
    nodes: Mapping[int, float] = field(default_factory=dict)
    drive: float = 0.0

    def __post_init__(self) -> None:
        shares = [self.gpu, self.drive, *self.nodes.values()]
        if any(not 0 <= share <= 1 for share in shares) or abs(sum(shares) - 1) > _CLOSE:
            raise ConfigError(
                f"home with {self.gpu} on the GPU, {dict(self.nodes)} on nodes and {self.drive} on "
                "the drive: shares are in [0, 1] and add up to 1"
            )

    def place(self, nbytes: int) -> PlacedBytes:
        """Whole bytes in every place, by largest remainder."""
        shares = [self.gpu, self.drive, *self.nodes.values()]
        total = sum(shares)
        exact = [nbytes * share / total for share in shares]
        counts = [int(part) for part in exact]
        missing = nbytes - sum(counts)
        order = sorted(range(len(counts)), key=lambda at: counts[at] - exact[at])
        # A rounded product can lie above the bytes there are: then the last ones give.
        step = 1 if missing > 0 else -1
        used = [at for at in order if shares[at] > 0]
        for at in (used if step > 0 else used[::-1])[: abs(missing)]:
            counts[at] += step
        gpu, drive, *on_nodes = counts
        return PlacedBytes(gpu, dict(zip(self.nodes, on_nodes, strict=True)), drive)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A transformer as its ``config.json`` describes it.

    Attributes
    ----------
    width
        Elements of a token between layers (``hidden_size``).
    heads, kv_heads, head_width
        Attention: query heads, heads of K and V (fewer with grouped queries), elements of a head.
    inner
        Width of the MLP; ``gated`` when it has three matrices instead of two (LLaMA).
    experts, active_experts
        MLPs of a layer, and how many of them each token meets (Mixtral); 1 and 1 without experts.
    element_bytes
        Of a weight and of an activation.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    vocab: int
    gated: bool = False
    experts: int = 1
    active_experts: int = 1
    element_bytes: int = 2

    def __post_init__(self) -> None:
        sizes = [
            self.layers, self.width, self.heads, self.kv_heads, self.head_width, self.inner,
            self.vocab, self.experts, self.active_experts, self.element_bytes,
        ]  # fmt: skip
        if min(sizes) < 1 or self.heads % self.kv_heads or self.active_experts > self.experts:
            raise ConfigError(
                f"model of {self.layers} layers, width {self.width}, {self.heads} heads over "
                f"{self.kv_heads} for K and V, {self.active_experts} of {self.experts} experts: "
                "sizes are at least 1, heads a multiple of kv_heads, active experts no more than "
                "there are"
            )

    @property
    def _attention_params(self) -> int:
        return 2 * self.width * self.head_width * (self.heads + self.kv_heads)

    @property
    def _expert_params(self) -> int:
        return (3 if self.gated else 2) * self.width * self.inner

    @property
    def layer_params(self) -> int:
        """Elements of the matrices of one layer; biases and norms are left out (below 0.1 %)."""
        return self._attention_params + self.experts * self._expert_params

    @property
    def head_params(self) -> int:
        """Elements of the output embedding."""
        return self.vocab * self.width

    @property
    def token_bytes(self) -> int:
        """One token's activations between layers."""
        return self.width * self.element_bytes

    def matrix_flops(self, tokens: int) -> float:
        """Operations of one layer's matrices on ``tokens`` tokens: a multiplication and an addition
        for every element that a token meets.
        """
        met = self._attention_params + self.active_experts * self._expert_params
        return 2.0 * met * tokens

    def attention_flops(self, queries: int, attended: float) -> float:
        """Operations of scores and values of one layer, each query over ``attended`` tokens."""
        return 4.0 * queries * attended * self.heads * self.head_width


__getattr__ = old_names(__name__)
