"""Bytes of every allocation of one run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from flexgen.compression import CompressionConfig
from flexgen.opt_config import OptConfig

from cxl_offload.integrations.fit import Need
from cxl_offload.integrations.flexgen.homes import FlexGenHomes
from cxl_offload.integrations.flexgen.request import FlexGenRun
from cxl_offload.objects.kind_store import Part
from cxl_offload.plan.flexgen.layout import TensorSizes, opt_groups
from cxl_offload.plan.kv_types import GROUP
from cxl_offload.renamed import old_names

COMPRESS_WEIGHTS = CompressionConfig(num_bits=4, group_size=GROUP, group_dim=0, symmetric=False)
COMPRESS_KV = CompressionConfig(num_bits=4, group_size=GROUP, group_dim=2, symmetric=False)
"""As FlexGen's own command line sets them."""


def tensor_sizes(config: OptConfig, *, prompt_len: int, gen_len: int) -> TensorSizes:
    """Shapes and sizes of a model as FlexGen allocates them."""
    hidden = int(config.input_dim)
    return TensorSizes(
        groups=opt_groups(
            layers=config.num_hidden_layers,
            hidden=hidden,
            vocab=config.vocab_size,
            positions=config.max_seq_len,
        ),
        layers=config.num_hidden_layers,
        width=hidden,
        heads=config.n_head,
        kv_width=hidden,
        vocab=config.vocab_size,
        prompt=prompt_len,
        generated=gen_len,
    )


@dataclass(frozen=True, slots=True)
class RunSizes:
    """Bytes of the allocations of one run, compressed ones too."""

    run: FlexGenRun
    homes: FlexGenHomes
    tensors: TensorSizes

    @property
    def kv_tensors(self) -> int:
        """K and V of every layer and batch."""
        return self.tensors.kv_tensors * self.run.num_gpu_batches

    def weight(self, shape: tuple[int, ...]) -> list[int]:
        """The allocations one weight takes."""
        if self.run.compress_weight and len(shape) >= 2:
            return _compressed(shape, COMPRESS_WEIGHTS)
        return [2 * math.prod(shape)]

    def kv(self, sequences: int) -> list[int]:
        """The allocations K (or V) of so many sequences takes, in one layer and batch."""
        if not self.run.compress_cache:
            return [self.tensors.kv_tensor_bytes(sequences)]
        return _compressed(self._cache_shape(sequences), COMPRESS_KV)

    def _cache_shape(self, sequences: int) -> tuple[int, int, int]:
        heads = self.tensors.heads
        return (self.tensors.positions, sequences * heads, self.tensors.kv_width // heads)

    def workspace(self, part: Part) -> Iterable[Need]:
        """Single-precision K and V of one batch that CPU attention reads."""
        run, tensors = self.run, self.tensors
        if not run.cpu_cache_compute or self.attends_in_place:
            return
        nbytes = tensors.workspace_tensor_bytes(run.gpu_batch_size)
        count = tensors.workspace_tensors(
            run.num_gpu_batches, overlap=run.overlap, sep_layer=run.sep_layer
        )
        if run.compress_cache:
            positions, columns, width = self._cache_shape(run.gpu_batch_size)
            group = COMPRESS_KV.group_size
            nbytes, count = 4 * positions * columns * -(-width // group) * group, 2
        yield Need("workspace", part.name, part.policy, nbytes, count)

    @property
    def attends_in_place(self) -> bool:
        """The CPU computes attention over the cache where it lies; never over one on disk."""
        run = self.run
        in_place = run.cpu_cache_compute and run.cpu_attention == "in-place"
        return in_place and self.homes.sequences[0] == 0

    def activations(self, part: Part) -> Iterable[Need]:
        """Hidden states of every batch and one being moved; masks when the CPU computes."""
        run, count = self.run, self.tensors.copies_on_host(self.run.num_gpu_batches)
        if not self.homes.hidden_on_accelerator:
            hidden = self.tensors.hidden_bytes(run.gpu_batch_size)
            yield Need("act", part.name, part.policy, hidden, count)
        if run.cpu_cache_compute:
            mask = self.tensors.mask_bytes(run.gpu_batch_size)
            yield Need("act", part.name, part.policy, mask, count)

    def accelerator_work(self) -> int:
        """Loaded weights and caches, hidden states, scores and logits of one batch."""
        run, tensors = self.run, self.tensors
        loaded = tensors.gpu_loaded_bytes if self.homes.weights_off_accelerator else 0
        if not self.homes.kv_on_accelerator and not run.cpu_cache_compute:
            loaded += 4 * sum(self.kv(run.gpu_batch_size))
        return loaded + tensors.gpu_batch_bytes(
            run.gpu_batch_size, run.num_gpu_batches, activations=self.homes.hidden_on_accelerator
        )


def _compressed(shape: tuple[int, ...], how: CompressionConfig) -> list[int]:
    """Bytes of the packed values and of the scales, groups rounded up."""
    rest = math.prod(shape) // shape[how.group_dim]
    groups = -(-shape[how.group_dim] // how.group_size)
    return [groups * (how.group_size // 2) * rest, groups * 2 * rest * 2]


__getattr__ = old_names(__name__)
