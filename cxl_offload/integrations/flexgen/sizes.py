"""Bytes of FlexGen's tensors, from its own shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flexgen.compression import CompressionConfig
from flexgen.opt_config import OptConfig

from cxl_offload.integrations.flexgen.predict import Need
from cxl_offload.integrations.flexgen.request import FlexGenRun
from cxl_offload.integrations.flexgen.shares import WeightGroup
from cxl_offload.integrations.flexgen.store import Part

__all__ = ["COMPRESS_KV", "COMPRESS_WEIGHTS", "Sizes"]

COMPRESS_WEIGHTS = CompressionConfig(num_bits=4, group_size=64, group_dim=0, symmetric=False)
COMPRESS_KV = CompressionConfig(num_bits=4, group_size=64, group_dim=2, symmetric=False)
"""As FlexGen's own command line sets them."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of every kind of tensor of one run."""

    run: FlexGenRun
    config: OptConfig
    prompt_len: int

    @property
    def positions(self) -> int:
        """Tokens a cache holds: all but the last, which nobody attends to."""
        return self.prompt_len + self.run.gen_len - 1

    @property
    def kv_tensors(self) -> int:
        """K and V of every layer and batch."""
        return int(2 * self.config.num_hidden_layers * self.run.num_gpu_batches)

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return int(self.config.input_dim // self.config.n_head)

    def weight(self, shape: tuple[int, ...]) -> list[int]:
        """The allocations one weight takes."""
        if self.run.compress_weight and len(shape) >= 2:
            return _compressed(shape, COMPRESS_WEIGHTS)
        return [2 * math.prod(shape)]

    def kv(self, sequences: int) -> list[int]:
        """The allocations K (or V) of so many sequences takes, in one layer and batch."""
        shape = (self.positions, sequences * self.config.n_head, self.head_dim)
        if self.run.compress_cache:
            return _compressed(shape, COMPRESS_KV)
        return [2 * math.prod(shape)]

    def workspace(self, part: Part) -> Iterable[Need]:
        """Single-precision K and V of one batch that CPU attention reads."""
        run = self.run
        if not run.has_workspace:
            return
        head_dim = self.head_dim
        copies = 2 if not run.sep_layer or (run.overlap and run.num_gpu_batches > 1) else 1
        if run.compress_cache:
            group = COMPRESS_KV.group_size
            head_dim, copies = -(-head_dim // group) * group, 1
        elements = self.positions * run.gpu_batch_size * self.config.n_head * head_dim
        yield Need("workspace", part.name, part.policy, 4 * elements, 2 * copies)

    def activations(self, part: Part) -> Iterable[Need]:
        """Hidden states of every batch and one being moved; masks when the CPU computes."""
        run, rows = self.run, self.run.gpu_batch_size
        if run.percent[5] == 100:
            hidden = 2 * rows * self.prompt_len * int(self.config.input_dim)
            yield Need("act", part.name, part.policy, hidden, run.num_gpu_batches + 1)
        if run.cpu_cache_compute:
            mask = rows * (self.prompt_len + run.gen_len)
            yield Need("act", part.name, part.policy, mask, run.num_gpu_batches + 1)

    def accelerator_work(self, groups: Sequence[WeightGroup]) -> int:
        """Loaded weights and caches, hidden states, scores and logits of one batch."""
        run, config = self.run, self.config
        rows, tokens, heads = run.gpu_batch_size, self.prompt_len, int(config.n_head)
        largest = max(2 * sum(group.sizes) for group in groups)
        loaded = 0 if run.percent[0] == 100 else 2 * largest
        if run.percent[2] < 100 and not run.cpu_cache_compute:
            loaded += 4 * sum(self.kv(rows))
        hidden = 2 * rows * tokens * int(config.input_dim)
        held = run.num_gpu_batches if run.percent[4] == 100 else 2
        scores = 2 * 2 * rows * heads * tokens * tokens
        logits = 2 * rows * tokens * int(config.vocab_size)
        return loaded + held * hidden + max(scores + 6 * hidden, 4 * hidden, logits)


def _compressed(shape: tuple[int, ...], how: CompressionConfig) -> list[int]:
    """Bytes of the packed values and of the scales, groups rounded up."""
    rest = math.prod(shape) // shape[how.group_dim]
    groups = -(-shape[how.group_dim] // how.group_size)
    return [groups * (how.group_size // 2) * rest, groups * 2 * rest * 2]
