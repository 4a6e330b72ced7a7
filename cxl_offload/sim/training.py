"""A trace of one training step with the optimizer on the host (ZeRO-Offload).

Forward and backward run on the GPU layer by layer, with activation checkpointing. In backward each
layer's gradients leave while the layer before it computes. Those of several passes are added up on
the GPU: the sum so far comes from the host in low precision and goes back there, and after the last
pass it goes to the fp32 gradients. Then the CPU runs Adam over fp32 parameters, gradients, momentum
and variance, layer by layer, and the low-precision parameters of a finished layer return while the
next one is updated. Source: Ren et al., ZeRO-Offload (USENIX ATC 2021), sections 4 and 5; Wang et
al., Performance Characterization of CXL Memory, IV-A; for gradients DeepSpeed 0.19.8,
stage_1_and_2.py (``copy_grads_in_partition``) and stage3.py (``partition_grads``), where nothing is
added on the CPU, because that "is very slow".
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cxl_offload.errors import ConfigError
from cxl_offload.sim.schedule import TraceBuilder
from cxl_offload.sim.trace import Trace
from cxl_offload.sim.workload import ModelShape, PlacedBytes, TensorHome

_FULL_BYTES = 4
"""Of a master parameter, accumulated gradient, momentum or variance (fp32)."""

_ON_GPU = TensorHome(gpu=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWork:
    """A model, a batch, and where parameters, gradients and optimizer states live.

    Attributes
    ----------
    micro_batch, accumulation
        Sequences of one pass, and passes of a step.
    tokens
        Of a sequence.
    parameters
        Low-precision parameters: in GPU memory (ZeRO stage 2), or loaded for every layer (stage 3).
    gradients, master, momentum, variance
        fp32 states. What is in GPU memory is updated there.
    checkpointing
        Backward computes forward again, but for the output embedding.
    attended
        Tokens that a query attends to, the mean of all queries and layers; None: those up to it.
    recomputed_scores
        Whether the backward of attention computes its scores again, as fused kernels do.
    stage
        Node that holds the low-precision sum of gradients, and through which the drive is used.
    zero_stage
        ZeRO's. In 1 gradients stay on the GPU until the last pass. In 2 each pass copies them out,
        and what earlier ones left in; where there is but one, neither is needed. In 3 each pass
        copies both ways, the first too.
    overlap
        Whether copies run beside computation.
    early_return
        Whether parameters of a finished layer return while the next one is updated, as the paper
        has it. DeepSpeed sends them when all are updated.
    cast_apart
        Whether the CPU reads updated parameters once more to convert them, as DeepSpeed does; a
        fused kernel writes both.
    moment_bytes
        Of an element of momentum or variance.
    checkpoints
        Where the input of every layer lies between forward and backward; None: in GPU memory.
    """

    shape: ModelShape
    micro_batch: int
    accumulation: int = 1
    tokens: int
    parameters: TensorHome = field(default=_ON_GPU)
    gradients: TensorHome
    master: TensorHome
    momentum: TensorHome
    variance: TensorHome
    checkpointing: bool = True
    attended: float | None = None
    recomputed_scores: bool = False
    stage: int = 0
    zero_stage: int = 2
    overlap: bool = True
    early_return: bool = True
    cast_apart: bool = False
    moment_bytes: float = _FULL_BYTES
    checkpoints: TensorHome | None = None

    def __post_init__(self) -> None:
        if self.zero_stage not in (1, 2, 3):
            raise ConfigError(f"ZeRO stage {self.zero_stage}: 1, 2 or 3")
        if min(self.micro_batch, self.accumulation, self.tokens) < 1:
            raise ConfigError(
                f"training with micro-batch {self.micro_batch}, {self.accumulation} passes and "
                f"{self.tokens} tokens: each is at least 1"
            )


def training_trace(work: TrainingWork) -> Trace:
    """Events of one step; phases ``forward``, ``backward`` and ``optimizer``."""
    run = _StepTrace(work)
    last = work.shape.layers  # the output embedding counts as a layer
    for number in range(work.accumulation):
        run.schedule.phase = "forward"
        if number == 0:
            run.load_parameters(0)
            run.schedule.barrier()
        for layer in range(last + 1):
            if layer < last:  # backward begins with the layer that forward ends with
                run.load_parameters(layer + 1)
            run.store_checkpoint(layer)
            run.compute(layer)
            run.schedule.barrier()
        run.schedule.phase = "backward"
        for layer in range(last, -1, -1):
            if layer > 0:
                run.load_parameters(layer - 1)
                run.load_checkpoint(layer - 1)
            if layer < last:
                run.store_gradients(layer + 1, number)
            run.compute_back(layer)
            run.schedule.barrier()
        run.store_gradients(0, number)
        run.schedule.barrier()
    run.schedule.phase = "optimizer"
    run.load_states(0)
    run.schedule.barrier()
    for layer in range(last + 1):
        if layer < last:
            run.load_states(layer + 1)
        if layer > 0 and work.early_return:
            run.return_layer(layer - 1)
        run.update(layer)
        run.schedule.barrier()
    for layer in (last,) if work.early_return else range(last + 1):
        run.return_layer(layer)
    return run.schedule.trace


class _StepTrace:
    def __init__(self, work: TrainingWork) -> None:
        self.schedule = TraceBuilder(stage=work.stage, overlap=work.overlap)
        self._work = work
        self._shape = work.shape

    def load_parameters(self, layer: int) -> None:
        """To the GPU, what is not there."""
        placed = self._work.parameters.place(self._low_bytes(layer))
        self.schedule.load("load_weight", "weights", placed)

    def store_checkpoint(self, layer: int) -> None:
        """The input of a layer leaves while the layer computes; that of the head stays."""
        placed = self._checkpoint(layer)
        host = placed.on_host(self._work.stage)
        nbytes = sum(host.values())
        self.schedule.add("checkpoints", "d2h", "act", write=host, accelerator_bytes=nbytes)
        self.schedule.to_drive("checkpoints", "act", placed.drive)

    def load_checkpoint(self, layer: int) -> None:
        """It comes back while the layer above it computes."""
        self.schedule.load("checkpoints", "act", self._checkpoint(layer))

    def _checkpoint(self, layer: int) -> PlacedBytes:
        home = self._work.checkpoints
        if home is None or layer == self._shape.layers:
            return _ON_GPU.place(0)
        return home.place(self._work.micro_batch * self._work.tokens * self._shape.token_bytes)

    def compute(self, layer: int) -> None:
        """Forward is one pass over a layer."""
        matrices, scores = self._flops(layer)
        self._add_compute(layer, matrices + scores, passes=1)

    def compute_back(self, layer: int) -> None:
        """Backward is two passes, and one more to compute forward again.

        Two products of matrices make attention; four make its backward, or five where the scores
        are not kept.
        """
        work, (matrices, scores) = self._work, self._flops(layer)
        flops = 2 * matrices + (2.5 if work.recomputed_scores else 2.0) * scores
        again = work.checkpointing and layer < self._shape.layers
        flops += matrices + scores if again else 0.0
        self._add_compute(layer, flops, passes=3 if again else 2)

    def _flops(self, layer: int) -> tuple[float, float]:
        """Of the matrices of a layer, and of its scores, forward."""
        shape, work = self._shape, self._work
        tokens = work.micro_batch * work.tokens
        if layer == shape.layers:
            return 2.0 * shape.head_params * tokens, 0.0
        attended = (work.tokens + 1) / 2 if work.attended is None else work.attended
        return shape.matrix_flops(tokens), shape.attention_flops(tokens, attended)

    def _add_compute(self, layer: int, flops: float, *, passes: int) -> None:
        tokens = self._work.micro_batch * self._work.tokens
        moved = passes * (self._low_bytes(layer) + 2 * tokens * self._shape.token_bytes)
        self.schedule.add("compute", "gpu", "act", flops=flops, accelerator_bytes=moved)

    def store_gradients(self, layer: int, number: int) -> None:
        """What pass ``number`` copies of a layer: the low-precision sum, at last the fp32 one."""
        work, add = self._work, self.schedule.add
        is_last = number == work.accumulation - 1
        placed = work.gradients.place(self._params(layer) * _FULL_BYTES)
        host = placed.on_host(work.stage)
        low = sum(host.values()) * self._shape.element_bytes // _FULL_BYTES
        held = {work.stage: low}
        if work.zero_stage == 3 or (work.zero_stage == 2 and work.accumulation > 1):
            if number > 0:
                add("gradients", "h2d", "gradients", read=held, accelerator_bytes=low)
                add("gradients", "gpu", "gradients", accelerator_bytes=3 * low)
            add("gradients", "d2h", "gradients", write=held, accelerator_bytes=low)
            if number == 0 and work.zero_stage == 3:
                add("gradients", "h2d", "gradients", read=held, accelerator_bytes=low)
        if is_last:
            full = sum(host.values())
            add("gradients", "d2h", "gradients", write=host, accelerator_bytes=full)
            self.schedule.to_drive("gradients", "gradients", placed.drive)

    def load_states(self, layer: int) -> None:
        """From the drive, what is there."""
        for kind, placed in self._states(layer).items():
            self.schedule.from_drive("load_state", kind, placed.drive)

    def update(self, layer: int) -> None:
        """Adam: reads four values a parameter, writes three and one in low precision."""
        work, add = self._work, self.schedule.add
        states = self._states(layer)
        reads: dict[int, int] = {}
        writes: dict[int, int] = {}
        for kind, placed in states.items():
            for node, count in placed.on_host(work.stage).items():
                reads[node] = reads.get(node, 0) + count
                if kind != "gradients":
                    writes[node] = writes.get(node, 0) + count
                if kind == "master" and work.cast_apart:
                    reads[node] += count
        in_gpu = sum(p.gpu * (1 if kind == "gradients" else 2) for kind, p in states.items())
        add("compute", "gpu", "optimizer", accelerator_bytes=in_gpu)
        for node, count in self._updated(layer).items():
            writes[node] = writes.get(node, 0) + count
        if reads:
            add("compute", "cpu", "optimizer", read=reads, write=writes)

    def return_layer(self, layer: int) -> None:
        """Parameters whose home is the GPU go there; states whose home is the drive go there."""
        low = self._work.parameters.place(self._low_bytes(layer))
        back = self._from_host(layer, low.gpu)
        self.schedule.add(
            "return", "h2d", "weights", read={self._work.stage: back}, accelerator_bytes=back
        )
        self.schedule.to_drive("store_state", "weights", low.drive)
        for kind, placed in self._states(layer).items():
            if kind != "gradients":
                self.schedule.to_drive("store_state", kind, placed.drive)

    def _updated(self, layer: int) -> dict[int, int]:
        """Where the CPU writes low-precision parameters: at home, or in the stage to return."""
        low = self._work.parameters.place(self._low_bytes(layer))
        writes = low.on_host(self._work.stage)
        back = self._from_host(layer, low.gpu)
        if back:
            writes[self._work.stage] = writes.get(self._work.stage, 0) + back
        return writes

    def _from_host(self, layer: int, in_gpu: int) -> int:
        """Of the parameters in GPU memory, those whose master copy is not."""
        master = self._work.master.place(self._params(layer) * _FULL_BYTES)
        there = master.gpu * self._shape.element_bytes // _FULL_BYTES
        return max(0, in_gpu - there)

    def _states(self, layer: int) -> dict[str, PlacedBytes]:
        work, params = self._work, self._params(layer)
        nbytes, moment = params * _FULL_BYTES, round(params * work.moment_bytes)
        return {
            "master": work.master.place(nbytes),
            "gradients": work.gradients.place(nbytes),
            "momentum": work.momentum.place(moment),
            "variance": work.variance.place(moment),
        }

    def _params(self, layer: int) -> int:
        return self._shape.head_params if layer == self._shape.layers else self._shape.layer_params

    def _low_bytes(self, layer: int) -> int:
        return self._params(layer) * self._shape.element_bytes
