"""A trace of inference with offloaded weights and KV cache: prefill, then token by token.

The order is FlexGen's (Sheng et al., FlexGen: High-throughput Generative Inference, 4.1 and
Algorithm 1): for every token, every layer, every GPU batch. While one batch computes in one layer,
the next layer's weights are loaded in as many parts as there are batches, the next batch's cache
and activations are loaded, and those of the batch before are stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from cxl_offload.errors import ConfigError
from cxl_offload.sim.schedule import TraceBuilder
from cxl_offload.sim.trace import Trace
from cxl_offload.sim.workload import ModelShape, PlacedBytes, TensorHome

_ON_GPU = TensorHome(gpu=1.0)
_CACHE_ELEMENT_BYTES = 4
"""Queries and results of attention on the CPU cross the link in single precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceWork:
    """A model, a batch, and where its tensors live.

    Attributes
    ----------
    batch, batches
        Sequences of one GPU batch, and how many of those are under way together.
    prompt, generated
        Tokens of a sequence; the first generated one comes from the prefill.
    weights, kv, activations
        Homes. What a GPU batch does not find in GPU memory is loaded for every layer.
    cpu_attention
        Decoding attends to the host's part of the cache on the CPU instead of loading it.
    stage
        Node through which the drive is read and written, and where the CPU's operands arrive.
    overlap
        Whether copies run beside computation.
    """

    shape: ModelShape
    batch: int
    batches: int = 1
    prompt: int
    generated: int
    weights: TensorHome = field(default=_ON_GPU)
    kv: TensorHome = field(default=_ON_GPU)
    activations: TensorHome = field(default=_ON_GPU)
    cpu_attention: bool = False
    stage: int = 0
    overlap: bool = True

    def __post_init__(self) -> None:
        if min(self.batch, self.batches, self.prompt, self.generated) < 1:
            raise ConfigError(
                f"inference with batch {self.batch} x {self.batches}, {self.prompt} tokens of "
                f"prompt and {self.generated} generated: each is at least 1"
            )


@dataclass(frozen=True, slots=True)
class _At:
    """A place in the order of the work: a token, a layer (the last is the output), a batch."""

    token: int
    layer: int
    batch: int


def inference_trace(work: InferenceWork) -> Trace:
    """Events of a whole run; phases ``prefill`` and ``decode``, and the tokens of each."""
    run = _RunTrace(work)
    order = list(_order(work))
    run.schedule.phase = "prefill"
    run.load_weights(0, part=0, parts=1)
    run.load_batch(order[0])
    run.schedule.barrier()
    before: _At | None = None
    for at, after in zip(order, [*order[1:], None], strict=True):
        run.schedule.phase = "prefill" if at.token == 0 else "decode"
        is_last_token = at.token + 1 == work.generated
        following = (at.layer + 1) % (work.shape.layers + 1)
        if following or not is_last_token:
            run.load_weights(following, part=at.batch, parts=work.batches)
        if after is not None:
            run.load_batch(after)
        if before is not None:
            run.store_batch(before)
        run.compute(at)
        run.schedule.barrier()
        before = at
    run.store_batch(order[-1])
    sequences = work.batch * work.batches
    trace = run.schedule.trace
    trace.count_tokens("prefill", sequences * work.prompt)
    trace.count_tokens("decode", sequences * (work.generated - 1))
    return trace


def _order(work: InferenceWork) -> Iterator[_At]:
    for token in range(work.generated):
        for layer in range(work.shape.layers + 1):
            for batch in range(work.batches):
                yield _At(token, layer, batch)


class _RunTrace:
    def __init__(self, work: InferenceWork) -> None:
        self.schedule = TraceBuilder(stage=work.stage, overlap=work.overlap)
        self._work = work
        self._shape = work.shape

    def load_weights(self, layer: int, *, part: int, parts: int) -> None:
        """One of several parts of a layer's weights that are not in GPU memory."""
        nbytes = self._weight_bytes(layer)
        share = nbytes * (part + 1) // parts - nbytes * part // parts
        self.schedule.load("load_weight", "weights", self._work.weights.place(share))

    def load_batch(self, at: _At) -> None:
        """Cache and activations that a batch needs for a layer."""
        work = self._work
        if self._is_output(at):
            return
        attended = self._cached(at)
        if attended:
            cached = work.kv.place(self._kv_bytes(attended))
            if work.cpu_attention:
                self.schedule.from_drive("load_cache", "kv", cached.drive)
            else:
                self.schedule.load("load_cache", "kv", cached)
        self.schedule.load("hidden", "act", self._activations(at))

    def store_batch(self, at: _At) -> None:
        """New cache entries and activations of a batch after a layer."""
        if self._is_output(at):
            return
        new = self._work.kv.place(self._kv_bytes(self._tokens(at)))
        self.schedule.store("store_cache", "kv", new)
        self.schedule.store("hidden", "act", self._activations(at))

    def compute(self, at: _At) -> None:
        """A batch in a layer; with attention on the CPU there is a way there and back."""
        shape, work = self._shape, self._work
        if self._is_output(at):
            flops = 2.0 * shape.head_params * work.batch
            self._on_gpu(flops, self._weight_bytes(at.layer))
            return
        tokens = work.batch * self._tokens(at)
        moved = self._weight_bytes(at.layer) + 2 * tokens * shape.token_bytes
        attended = self._cached(at)
        if not attended:  # the prompt attends to itself, half of it in the mean
            half = (self._tokens(at) + 1) / 2
            flops = shape.matrix_flops(tokens) + shape.attention_flops(tokens, half)
            self._on_gpu(flops, moved + self._kv_bytes(self._tokens(at)))
            return
        cached = work.kv.place(self._kv_bytes(attended))
        host = cached.on_host(work.stage) if work.cpu_attention else {}
        share = sum(host.values()) / max(1, self._kv_bytes(attended))
        flops = shape.attention_flops(work.batch, attended + 1)
        in_gpu = moved + self._kv_bytes(attended) - sum(host.values())
        self._on_gpu(shape.matrix_flops(tokens) + flops * (1 - share), in_gpu)
        if host:
            self._attend_on_cpu(host, share, flops)

    def _attend_on_cpu(self, host: dict[int, int], share: float, flops: float) -> None:
        shape, work = self._shape, self._work
        queries = round(work.batch * share * shape.heads * shape.head_width)
        operands = queries * _CACHE_ELEMENT_BYTES
        there = {work.stage: operands}
        add = self.schedule.add
        add("compute", "d2h", "act", write=there, accelerator_bytes=operands)
        add("compute", "cpu", "workspace", read=host, write=there, flops=flops * share)
        add("compute", "h2d", "act", read=there, accelerator_bytes=operands)

    def _on_gpu(self, flops: float, nbytes: int) -> None:
        self.schedule.add("compute", "gpu", "act", flops=flops, accelerator_bytes=nbytes)

    def _is_output(self, at: _At) -> bool:
        return at.layer == self._shape.layers

    def _weight_bytes(self, layer: int) -> int:
        shape = self._shape
        params = shape.head_params if layer == shape.layers else shape.layer_params
        return params * shape.element_bytes

    def _tokens(self, at: _At) -> int:
        return self._work.prompt if at.token == 0 else 1

    def _cached(self, at: _At) -> int:
        """Tokens already in the cache of every sequence."""
        return 0 if at.token == 0 else self._work.prompt + at.token - 1

    def _kv_bytes(self, tokens: int) -> int:
        return tokens * self._work.batch * self._shape.kv_token_bytes

    def _activations(self, at: _At) -> PlacedBytes:
        tokens = self._work.batch * self._tokens(at)
        return self._work.activations.place(tokens * self._shape.token_bytes)
