"""What a generation on CPUs reads, writes and computes, as events that a machine can replay.

Every decoder layer, and every module with weights beside the layers, is a step. Bytes are those of
the model and its caches, on the nodes where their pages are; activations between them, which mostly
stay in caches of the CPU, are left out. Of experts so many are counted as tokens ask for in the
mean.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from cxl_offload.integrations.transformers.asked_experts import experts_per_token
from cxl_offload.integrations.transformers.conventions import text_config
from cxl_offload.integrations.transformers.growing_layers import GrowingStates
from cxl_offload.integrations.transformers.phases import DECODE, PREFILL, new_tokens
from cxl_offload.memory import NOT_FAULTED_IN, Session
from cxl_offload.objects.weight_kinds import kind_of
from cxl_offload.plan.decoding.engine import TRANSFORMERS
from cxl_offload.plan.equations.experts import asked_share
from cxl_offload.plan.transformers.shares import KV
from cxl_offload.sim.trace import Engine, Event, Trace

WEIGHTS, HIDDEN = "weights", "act"
_OF_PRODUCTS = TRANSFORMERS.attention_flops_per_core / TRANSFORMERS.products_flops_per_core
"""A replay has one rate of arithmetic on CPUs, attention's; products count by theirs."""


class RunTrace:
    """Collects events of a model's forward passes.

    Parameters
    ----------
    session
        Knows where pages are; memory of others counts for the node of the CPUs that run this.

    Attributes
    ----------
    trace
        What was collected.
    """

    def __init__(self, session: Session) -> None:
        self.trace = Trace()
        self._session = session
        self._phase = PREFILL
        self._step = -1
        self._known: dict[tuple[int, int], Mapping[int, int]] = {}

    @contextlib.contextmanager
    def following(self, model: PreTrainedModel, *, wanted: bool = True) -> Iterator[None]:
        """Collects inside of the block, if that is wanted; nothing moves meanwhile."""
        if not wanted:
            yield
            return
        hooks: list[Any] = [model.register_forward_pre_hook(self._begins, with_kwargs=True)]
        inside = set[nn.Module]()
        config = text_config(model)
        for name, module in model.named_modules():
            if module in inside:
                continue
            if isinstance(module, GradientCheckpointingLayer):
                inside.update(module.modules())
                layer = RecordedLayer(module, name, config)
                hooks.append(
                    module.register_forward_hook(self._layer_ends(layer), with_kwargs=True)
                )
            elif own := list(module.parameters(recurse=False)):
                hooks.append(module.register_forward_hook(self._module_ends(own)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._known.clear()

    def _begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        given = new_tokens(args, kwargs)
        if given is None:
            return
        rows, tokens = int(given.shape[0]), int(given.shape[1])
        self._phase = DECODE if tokens == 1 and len(self.trace) else PREFILL
        self.trace.count_tokens(self._phase, rows * tokens)

    def _layer_ends(self, layer: RecordedLayer) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            states = args[0] if args else kwargs["hidden_states"]
            self._begin_step()
            self._multiplies(layer.weights, int(states.shape[0]), int(states.shape[1]))
            given = (*args, *kwargs.values())
            cache = next((each for each in given if isinstance(each, Cache)), None)
            self._attends(layer, cache, states)

        return hook

    def _begin_step(self) -> None:
        self._step += 1

    def _multiplies(
        self, weights: Sequence[tuple[torch.Tensor, float]], rows: int, tokens: int
    ) -> None:
        """Weights that were read, each with the share of it that a token asks for."""
        read: Counter[int] = Counter()
        flops = 0.0
        for weight, asked in weights:
            share = asked_share(asked, rows * tokens)
            read.update(scaled(self._nodes(weight), share))
            flops += 2.0 * weight.numel() * rows * tokens * asked
        self._add("compute", WEIGHTS, read=read, flops=flops * _OF_PRODUCTS)

    def _attends(self, layer: RecordedLayer, cache: Any, states: torch.Tensor) -> None:
        """Keys and values that a layer has read and written; a prompt reads what is still near."""
        rows, tokens = int(states.shape[0]), int(states.shape[1])
        kept = None if cache is None else cache.layers[layer.number]
        if kept is None or not isinstance(getattr(kept, "keys", None), torch.Tensor):
            return
        shown = (kept.keys, kept.values)
        held = kept.kept_tensors() if isinstance(kept, GrowingStates) else shown
        positions = int(shown[0].shape[2])
        read: Counter[int] = Counter()
        for part, whole in zip(shown, held, strict=True):
            read.update(scaled(self._nodes(whole), part.nbytes / max(whole.nbytes, 1)))
        new = scaled(read, min(1.0, tokens / max(positions, 1)))
        first = tokens > 1 and tokens >= positions
        seen = positions / 2 if first else positions
        flops = 4.0 * rows * tokens * seen * layer.query_width
        self._add("compute", KV, read={} if first else read, flops=flops)
        self._add("store_cache", KV, write=new)

    def _module_ends(self, weights: list[torch.Tensor]) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            made = output[0] if isinstance(output, tuple) else output
            if not isinstance(made, torch.Tensor):
                return
            self._begin_step()
            if isinstance(module, nn.Embedding):
                self._looks_up(module.weight, made)
            else:
                self._beside(weights, args, made)

        return hook

    def _beside(self, weights: list[torch.Tensor], given: Any, made: torch.Tensor) -> None:
        """A module that is no layer has computed with all of its weights."""
        tokens = made.numel() // max(int(made.shape[-1]), 1)
        self._multiplies([(weight, 1.0) for weight in weights], tokens, 1)

    def _looks_up(self, weight: torch.Tensor, made: torch.Tensor) -> None:
        """As many rows of a table as there are tokens were read."""
        tokens = made.numel() // max(int(made.shape[-1]), 1)
        share = min(1.0, tokens / weight.shape[0])
        self._add("compute", WEIGHTS, read=scaled(self._nodes(weight), share))

    def _nodes(self, tensor: torch.Tensor) -> Mapping[int, int]:
        """Bytes of a tensor on every node; asked once, since nothing moves in a run."""
        key = (tensor.data_ptr(), tensor.nbytes)
        if key not in self._known:
            here = {self._session.kernel.local_node: tensor.nbytes}
            if tensor.is_contiguous() and self._session.find(key[0]) is not None:
                found = self._session.bytes_per_node(*key)
                here = {node: count for node, count in found.items() if node != NOT_FAULTED_IN}
            self._known[key] = here
        return self._known[key]

    def _add(
        self,
        queue: str,
        kind: str,
        *,
        engine: Engine = "cpu",
        read: Mapping[int, int] | None = None,
        write: Mapping[int, int] | None = None,
        accelerator_bytes: int = 0,
        flops: float = 0.0,
    ) -> None:
        reads, writes = dict(read or {}), dict(write or {})
        self.trace.append(
            Event(
                self._phase,
                self._step,
                queue,
                engine,
                kind,
                reads,
                writes,
                accelerator_bytes,
                flops,
            )
        )


class RecordedLayer:
    """A decoder layer: its weights, each with the share of it that a token asks for."""

    def __init__(self, module: nn.Module, name: str, config: Any) -> None:
        asked = experts_per_token(config)
        self.weights: list[tuple[torch.Tensor, float]] = []
        for each, weight in module.named_parameters():
            stacked = kind_of(f"{name}.{each}") == "experts" and weight.dim() > 1
            share = asked / weight.shape[0] if asked and stacked and weight.dim() == 3 else 1.0
            self.weights.append((weight, min(1.0, share)))
        numbers = (getattr(each, "layer_idx", None) for each in module.modules())
        self.number = next((number for number in numbers if isinstance(number, int)), 0)
        heads = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.query_width = heads * dim


def scaled(nodes: Mapping[int, int], share: float) -> dict[int, int]:
    return {node: round(count * share) for node, count in nodes.items()}
