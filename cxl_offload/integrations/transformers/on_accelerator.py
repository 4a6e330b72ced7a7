"""A model that computes on an accelerator, with what lies in tiers streamed to it.

Decoder layers, and other modules with weights in tiers, are stages of a stream. Embeddings in a
tier are looked up there by the CPU, and the rows that were found go to the accelerator. All other
weights and buffers are on the accelerator while the block lasts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import streamed_weights
from cxl_offload.integrations.transformers.asked_experts import (
    experts_per_token,
    stacked_experts_in,
)
from cxl_offload.integrations.transformers.compute_device import moved
from cxl_offload.integrations.transformers.conventions import text_config
from cxl_offload.integrations.transformers.int4_layers import Int4Linear
from cxl_offload.integrations.transformers.kinds import kind_of_weight
from cxl_offload.integrations.transformers.parted_copies import WeightCopies
from cxl_offload.integrations.transformers.stage_hooks import (
    after,
    asking,
    before,
    found_rows,
    let_threads_take_turns,
    on_the_host,
)
from cxl_offload.integrations.transformers.streamed_states import StateStream
from cxl_offload.integrations.transformers.streamed_weights import (
    WeightStage,
    WeightStream,
)
from cxl_offload.integrations.transformers.weights import named_weights
from cxl_offload.ops.view import untraced
from cxl_offload.units import format_bytes

_PLAIN = (torch.Tensor, nn.Parameter)
_IDS = "input_ids"


@dataclass(frozen=True, slots=True)
class WeightHomes:
    """Where the weights of a model are while it computes on an accelerator.

    Attributes
    ----------
    stages
        What is streamed, in the order of the model's modules.
    looked_up
        Embeddings that the CPU reads where they lie.
    resident
        What is on the accelerator as long as the block lasts, each tensor once.
    """

    stages: tuple[WeightStage, ...]
    looked_up: tuple[nn.Embedding, ...]
    resident: tuple[torch.Tensor, ...]

    @classmethod
    def of(
        cls, model: PreTrainedModel, kinds: Collection[str], staying: Collection[str] = ()
    ) -> WeightHomes:
        """As the kinds say that lie on the host, but for the weights of the names that stay."""
        tied = getattr(model, "all_tied_weights_keys", {})
        on_host = {
            weight
            for name, weight in named_weights(model)
            if kind_of_weight(name, tied) in kinds and name not in staying
        }
        stages, looked_up, inside = [], [], set[nn.Module]()
        per_token = experts_per_token(text_config(model))
        for name, module in model.named_modules():
            if module in inside:
                continue
            own: list[torch.Tensor] = _tensors(module, recurse=False)
            if isinstance(module, GradientCheckpointingLayer):
                inside.update(module.modules())
                own = _tensors(module, recurse=True)
            elif isinstance(module, nn.Embedding) and module.weight in on_host:
                looked_up.append(module)
                continue
            if weights := tuple(each for each in own if each in on_host and each.numel()):
                experts = stacked_experts_in(module, frozenset(weights), per_token)
                stages.append(WeightStage(name, module, weights, experts))
        streamed = {weight for stage in stages for weight in stage.weights}
        streamed |= {each for module in looked_up for each in _tensors(module, recurse=True)}
        resident = [each for each in _tensors(model, recurse=True) if each not in streamed]
        return cls(tuple(stages), tuple(looked_up), tuple(resident))

    def needed_bytes(self, device: torch.device) -> int:
        """What the device has to have free: two buffers, and what is not there yet."""
        there = sum(each.nbytes for each in self.resident if each.device != device)
        return there + min(2, len(self.stages)) * self.largest_stage_bytes

    @property
    def largest_stage_bytes(self) -> int:
        """Of a buffer."""
        return max((stage.nbytes for stage in self.stages), default=0)


def _tensors(module: nn.Module, *, recurse: bool) -> list[torch.Tensor]:
    found = [*module.parameters(recurse), *module.buffers(recurse)]
    return list(dict.fromkeys(found))


def check_streamable(
    model: PreTrainedModel,
    kinds: Collection[str],
    device: torch.device,
    free: int,
    staying: Collection[str] = (),
    state_bytes: int = 0,
) -> WeightHomes:
    """Refuse what cannot compute on the accelerator, before anything is moved there.

    Parameters
    ----------
    kinds
        Those that lie on the host.
    free
        Bytes that the device has left.
    staying
        Names of weights that are on the device all the same.
    state_bytes
        Of buffers of hidden states.

    Raises
    ------
    ConfigError
        In one line: training mode, layers or weights of other classes than transformers' common
        ones, weights on other devices, or too little memory on the device.
    """
    name = type(model).__name__
    if model.training:
        raise ConfigError(
            f"{name} is in training mode, and weights that are streamed are not trained; call "
            "eval() first, or leave accelerator out"
        )
    if not any(isinstance(each, GradientCheckpointingLayer) for each in model.modules()):
        raise ConfigError(
            f"{name} has no layers of transformers' own class, so nothing says what is streamed "
            "at a time; leave accelerator out"
        )
    if getattr(model, "hf_device_map", None) is not None:
        raise ConfigError(
            f"{name} was dispatched by accelerate (device_map); load it without, or leave "
            "accelerator out"
        )
    if any(isinstance(each, Int4Linear) for each in model.modules()):
        raise ConfigError(f"{name} has layers of 4 bits, which CPUs compute; leave accelerator out")
    for weight_name, weight in (*model.named_parameters(), *model.named_buffers()):
        _check_weight(weight_name, weight, device)
    homes = WeightHomes.of(model, kinds, staying)
    _check_on_host(homes, model, device)
    check_room(type(model).__name__, homes, device, free, state_bytes=state_bytes)
    return homes


def check_room(
    name: str,
    homes: WeightHomes,
    device: torch.device,
    free: int,
    *,
    kv_bytes: int = 0,
    state_bytes: int = 0,
) -> None:
    """Refuse a model whose buffers and resident weights the device has no room for.

    Nor for its keys and values there, and the buffers of its hidden states.

    Raises
    ------
    ConfigError
        Names the largest of what is streamed.
    """
    needed = homes.needed_bytes(device) + kv_bytes + state_bytes
    if needed <= free:
        return
    largest = max(homes.stages, key=lambda stage: stage.nbytes, default=None)
    about = ""
    if largest is not None:
        about = (
            f" ({largest.name}, the largest of what is streamed, takes "
            f"{format_bytes(largest.nbytes)} twice)"
        )
    beside = {"keys and values": kv_bytes, "buffers of hidden states": state_bytes}
    each = [f"{format_bytes(nbytes)} of {what}" for what, nbytes in beside.items() if nbytes]
    kept = f" with {' and '.join(each)}" if each else ""
    less = "a smaller share of keys and values (accelerator_kv), " if kv_bytes else ""
    less += "fewer rows_at_once, " if state_bytes else ""
    raise ConfigError(
        f"{name}{kept} needs {format_bytes(needed)} on {device}{about}, which has "
        f"{format_bytes(free)} left; give {less}policies for more kinds of weights, or a larger "
        "accelerator"
    )


def _check_weight(name: str, weight: torch.Tensor, device: torch.device) -> None:
    if type(weight) not in _PLAIN or weight.layout is not torch.strided or weight.is_quantized:
        raise ConfigError(
            f"{name} is a {type(weight).__name__} of a class of its own (quantized, or divided "
            "among ranks), which is not streamed; leave accelerator out"
        )
    if weight.device.type != "cpu" and weight.device != device:
        raise ConfigError(
            f"{name} is on {weight.device}; load the model to the CPU, from where its weights go "
            f"to {device}"
        )


def _check_on_host(homes: WeightHomes, model: nn.Module, device: torch.device) -> None:
    """A weight that lies on the accelerator already is not streamed from a tier."""
    if device.type == "cpu":
        return
    in_tiers = [weight for stage in homes.stages for weight in stage.weights]
    in_tiers += [module.weight for module in homes.looked_up]
    for weight in in_tiers:
        if weight.device.type != "cpu":
            name = next(name for name, each in named_weights(model) if each is weight)
            raise ConfigError(
                f"{name} is on {weight.device} already and has a policy of the host; call "
                "model.cpu() first"
            )


def compute_on(
    model: PreTrainedModel,
    homes: WeightHomes,
    copies: WeightCopies,
    stack: contextlib.ExitStack,
    states: StateStream | None = None,
) -> WeightStream:
    """Let a model compute on the accelerator until the stack closes.

    Parameters
    ----------
    homes
        Of the model; what is streamed lies in its tiers already.
    copies
        To the accelerator.
    states
        Of rows that are computed in turn; they end with every pass, as the weights do.

    Returns
    -------
    WeightStream
        What the stages are given their weights by.

    Raises
    ------
    torch.OutOfMemoryError
        The accelerator has no room; what was moved goes back when the stack closes.
    """
    device = copies.device
    stack.callback(
        _bring_back,
        model,
        [each for each in _tensors(model, recurse=True) if each.device.type != "cpu"],
    )
    for weight in homes.resident:
        streamed_weights.show(weight, weight.data.to(device))
    rows_at_once = None if states is None else states.rows_at_once
    stream = WeightStream(homes.stages, copies, rows_at_once)
    if states is not None:
        states.beside = stream.copy_more
    stack.callback(stream.close)
    for hook in _hooks(model, homes, stream, device):
        stack.callback(hook.remove)
    ends = (stream.end_all,) if states is None else (stream.end_all, states.end)
    let_threads_take_turns(model, ends, stack)
    return stream


def _bring_back(model: nn.Module, stayed: list[torch.Tensor]) -> None:
    """Whatever the block has put on the accelerator, also by replacing a buffer."""
    for tensor in _tensors(model, recurse=True):
        if tensor.device.type != "cpu" and not any(tensor is each for each in stayed):
            streamed_weights.show(tensor, tensor.data.to("cpu"))


def _hooks(
    model: nn.Module, homes: WeightHomes, stream: WeightStream, device: torch.device
) -> Iterator[Any]:
    given = _given_on(homes, device)
    yield model.register_forward_pre_hook(given, with_kwargs=True, prepend=True)
    for module in homes.looked_up:
        yield module.register_forward_pre_hook(on_the_host, with_kwargs=True)
        yield module.register_forward_hook(found_rows(device))
    for at, stage in enumerate(homes.stages):
        yield stage.module.register_forward_pre_hook(before(stream, at, device), with_kwargs=True)
        yield stage.module.register_forward_hook(after(stream, at), always_call=True)
        for which, experts in enumerate(stage.experts):
            ask = asking(stream, at, which, experts)
            yield experts.module.register_forward_pre_hook(ask, with_kwargs=True)


def _given_on(homes: WeightHomes, device: torch.device) -> Callable[..., Any]:
    """All that a model is given goes to the accelerator, but token ids that the CPU looks up."""
    stays = {_IDS} if homes.looked_up else set[str]()

    @untraced
    def hook(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if model.training or torch.is_grad_enabled():
            raise ConfigError(
                f"{type(model).__name__} computes with weights that are streamed, which carry no "
                "gradients; call it under torch.no_grad(), in eval mode"
            )
        named = {
            name: given if name in stays else moved(given, device) for name, given in kwargs.items()
        }
        return (args if stays else moved(args, device)), named

    return hook
