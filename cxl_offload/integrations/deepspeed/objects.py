"""Which objects ZeRO-Offload keeps on the host, and where DeepSpeed 0.19.8 holds them.

Everything that knows DeepSpeed's attributes by name is here. Stages 1 and 2 are one class, stage 3
another; what both lack is left out, so that a new attribute shows up as a kind without bytes in the
tests rather than as an error in a user's run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_STAGE_1_2 = "deepspeed.runtime.zero.stage_1_and_2"
_STAGE_3 = "deepspeed.runtime.zero.stage3"
_PARTITIONING = "deepspeed.runtime.zero.partition_parameters"

SITES = {
    (_STAGE_1_2, "initialize_optimizer_states"): "fp32_grad",
    (_STAGE_1_2, "buffer_to_accumulate_to_in_cpu"): "grad_accumulation",
    (_STAGE_3, "initialize_optimizer_states"): "fp32_grad",
    (_STAGE_3, "_setup_for_real_optimizer"): "staging",
    (_STAGE_3, "_create_param_groups_fp16_flat_cpu_memory"): "params",
    (_PARTITIONING, "_partition_param"): "params",
    (_PARTITIONING, "_partition_param_sec"): "params",
}
"""Module and function that asks for pinned memory, to the kind it is for."""

MIXED_SITE = (_STAGE_1_2, "__init__")
"""Asks for three kinds; the type tells some, the attributes of the finished engine the rest."""


@dataclass(frozen=True, slots=True)
class HostObject:
    """A tensor that DeepSpeed keeps on the host.

    ``movable``: all of its users find it through this tensor object, or are linked again, so that
    its ``.data`` may be exchanged.
    """

    kind: str
    tensor: torch.Tensor
    movable: bool = True


def inner_optimizer(zero: Any) -> torch.optim.Optimizer | None:
    """The optimizer that updates the fp32 partitions; None where ZeRO has none."""
    found = getattr(zero, "optimizer", None)
    return found if isinstance(found, torch.optim.Optimizer) else None


def is_stage3(zero: Any) -> bool:
    return hasattr(zero, "fp32_partitioned_groups_flat")


def masters(zero: Any) -> list[torch.Tensor]:
    """fp32 partitions on the host that are in memory as a whole; none where they are swapped."""
    if is_stage3(zero):
        resident = zero.offload_optimizer and not zero.swap_optimizer
        return list(zero.fp32_partitioned_groups_flat) if resident else []
    if getattr(zero, "cpu_offload", False):
        return list(zero.single_partition_of_fp32_groups)
    return []


def host_objects(zero: Any) -> Iterator[HostObject]:
    """Everything that is on the host now, states of the optimizer aside."""
    if is_stage3(zero):
        found = _of_stage3(zero)
    elif hasattr(zero, "offload_device"):
        found = _of_parameters(zero)
    else:
        found = _of_stage_1_2(zero)
    for each in found:
        if each.tensor.device.type == "cpu" and each.tensor.numel():
            yield each


def _of_stage_1_2(zero: Any) -> Iterator[HostObject]:
    if not getattr(zero, "cpu_offload", False):
        return
    for master in masters(zero):
        yield HostObject("fp32_master", master)
        if master.grad is not None:
            yield HostObject("fp32_grad", master.grad)
    for staging in zero.param_buffer_of_bit16_for_cpu_offload_groups:
        yield HostObject("staging", staging)
    yield HostObject("temp_grad", zero.temp_grad_buffer_for_cpu_offload)
    for accumulated in zero.accumulated_grads_in_cpu.values():
        # With low-precision master gradients these are views of the gradient.
        if accumulated.untyped_storage().nbytes() == accumulated.nbytes:
            yield HostObject("grad_accumulation", accumulated)


def _of_stage3(zero: Any) -> Iterator[HostObject]:
    low = {each.data_ptr() for each in zero.fp16_partitioned_groups_flat if each is not None}
    for master in masters(zero):
        # Under torch.autocast the model's own shards are the masters, and gathers use them.
        yield HostObject("fp32_master", master, movable=master.data_ptr() not in low)
        if master.grad is not None:
            yield HostObject("fp32_grad", master.grad)
    flat = getattr(zero, "grad_partitions_flat_buffer", None)
    if zero.offload_optimizer and flat is not None:
        yield HostObject("staging", flat, movable=False)
    if zero.offload_param and not zero.params_in_nvme_and_cpu:
        for params in zero.param_groups_fp16_flat_cpu_memory:
            yield HostObject("params", params, movable=False)


def _of_parameters(zero: Any) -> Iterator[HostObject]:
    """Stage 3 without an optimizer, for inference: one shard a parameter."""
    if zero.offload_device == "cpu":
        for param in _parameters(zero):
            yield HostObject("params", param.ds_tensor)  # type: ignore[attr-defined]


def relink(zero: Any) -> None:
    """Makes DeepSpeed's views of fp32 parameters, gradients and states follow exchanged memory.

    Without it ``safe_get_full_fp32_param`` would return what was there before. Only stages 1 and 2
    have such views; stage 3 finds its partitions through the tensors themselves.
    """
    if not hasattr(zero, "_hp_optimizer_states_linked"):
        return
    linked = zero._hp_optimizer_states_linked
    zero._link_all_hp_params()
    if linked:
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def held_tensors(zero: Any) -> Iterator[torch.Tensor]:
    """Every tensor that ZeRO holds in its attributes, views in nested lists and mappings too.

    After ``destroy()`` only these keep host memory alive, even where the engine is still held.
    """
    waiting: list[Any] = [vars(zero)]
    waiting += [getattr(param, "ds_tensor", None) for param in _parameters(zero)]
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.Tensor):
            yield each
            if each.is_leaf and each.grad is not None:
                yield each.grad
        elif isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each


def _parameters(zero: Any) -> list[torch.Tensor]:
    module = getattr(zero, "module", None)
    return list(module.parameters()) if isinstance(module, torch.nn.Module) else []


def unplaced(engine: Any) -> tuple[str, ...]:
    """What DeepSpeed keeps where no policy reaches, in words, from the engine's configuration."""
    found: list[str] = []
    optimizer, params = engine.zero_offload_optimizer(), engine.zero_offload_param()
    if optimizer is None or optimizer.device == "none":
        found.append("optimizer: not offloaded (zero_optimization.offload_optimizer is not set)")
    else:
        if optimizer.device == "nvme" and is_stage3(engine.optimizer):
            found.append("optimizer states and fp32 parameters: on NVMe, in buffers of its own")
        if getattr(optimizer, "super_offload", False):
            found.append("optimizer states: in a process of SuperOffload")
    if params is not None and params.device == "nvme":
        found.append("params: on NVMe, in buffers of its own")
    if getattr(engine.optimizer, "zenflow", False):
        found.append("optimizer states: in a process of ZenFlow")
    return tuple(found)


def in_other_process(engine: Any) -> bool:
    """Whether another process shares the optimizer's tensors, so that they must stay put."""
    optimizer = engine.zero_offload_optimizer()
    return bool(getattr(engine.optimizer, "zenflow", False)) or bool(
        getattr(optimizer, "super_offload", False)
    )
