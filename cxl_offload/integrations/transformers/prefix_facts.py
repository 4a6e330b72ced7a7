"""What the KV of a prompt depends on besides its tokens: the facts of kept prefixes.

The weights count by all of their bytes as they are in memory, wherever they came from: what was
trained, merged or damaged after it was loaded is another model. Reading them takes one pass, when a
block begins. Later calls look at the addresses and versions that torch counts, and at samples, and
read all again where one of these has changed. Modules count by their classes and by their plain
attributes (numbers, texts, functions by name), which every call looks at.
"""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.conventions import own_attention, text_config
from cxl_offload.tensor_bytes import held_tensors

FORMAT = "transformers 1"
"""Of the bytes of a block: layers, each with keys and values, ``(heads, tokens, width)``."""

_SAMPLES = 16
_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version")
_PLACES = ("name_or_path",)
"""Attributes of modules that say where a model came from."""

_NAMED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
_PLAIN = frozenset({bool, int, float, str, torch.dtype, *_NAMED})

_BY_LENGTH = ("dynamic", "longrope")
"""Rotary positions that are others in a longer text, for the tokens before too."""


def check_prefixes(model: PreTrainedModel) -> None:
    """Refuse a model whose KV does not depend on the tokens up to a position alone.

    Raises
    ------
    ConfigError
        One line with the reason.
    """
    why = why_not_known(model)
    if not why and any(hasattr(weight, "to_local") for weight in model.parameters()):
        why = "its weights are divided among ranks"
    layers = DynamicCache(config=text_config(model)).layers
    if not why and not all(isinstance(layer, DynamicLayer) for layer in layers):
        why = "it keeps states that are not keys and values of positions"
    odd = [kind for kind in _BY_LENGTH if kind in _rope_types(text_config(model).to_dict())]
    if not why and odd:
        why = f"its rotary positions ({odd[0]}) depend on the length of the text"
    if why:
        raise ConfigError(f"prefixes of {type(model).__name__} cannot be kept: {why}")


def why_not_known(model: PreTrainedModel) -> str:
    """What of a model cannot be told from its weights and configuration; empty: nothing."""
    for module in model.modules():
        if any(base.__module__.startswith("peft.") for base in type(module).__mro__):
            return "it has an adapter, which may be switched off and on; merge it"
    return ""


def _rope_types(config: Any) -> set[str]:
    if not isinstance(config, Mapping):
        return set()
    found = {str(config[name]) for name in ("rope_type", "type") if name in config}
    return found.union(*(_rope_types(value) for value in config.values()))


class ModelFacts:
    """The facts of a model, as it is at each call.

    Parameters
    ----------
    model
        Before its attention is taken.
    shape
        Layers, heads, tokens and width of a block.
    """

    def __init__(self, model: PreTrainedModel, shape: tuple[int, ...]) -> None:
        self._model = model
        self._attention = own_attention(model)
        self._shape = shape
        self._seen = b""
        self._weights = ""
        self._plain: list[object] = []
        self._modules = ""

    def now(self) -> dict[str, str]:
        """All facts, name to text.

        Raises
        ------
        ConfigError
            Weights that are not in memory.
        """
        model = self._model
        seen = _looks(model)
        if not seen or seen != self._seen:
            self._weights, self._seen = _weights_digest(model), seen
        plain = _plain_attributes(model)
        if not self._modules or plain != self._plain:
            self._modules, self._plain = _digest_of(plain), plain
        config = {
            name: value
            for name, value in model.config.to_dict().items()
            if name not in _NOT_OF_THE_MODEL
        }
        text = json.dumps(config, sort_keys=True, default=str)
        return {
            "format": FORMAT,
            "model": Path(str(getattr(model.config, "_name_or_path", ""))).name,
            "class": type(model).__name__,
            "configuration": hashlib.sha256(text.encode()).hexdigest()[:32],
            "weights": self._weights,
            "modules": self._modules,
            "dtype": str(model.dtype).removeprefix("torch."),
            "attention": self._attention,
            "device": model.device.type,
            "layers, heads, tokens, width": str(self._shape),
            "transformers": str(transformers.__version__),
            "torch": str(torch.__version__),
        }


def root_of(facts: Mapping[str, str]) -> bytes:
    """What the first key of every prompt follows."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).digest()


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    for named in (model.named_parameters(), model.named_buffers()):
        for name, tensor in named:
            for number, held in enumerate(held_tensors(tensor)):
                yield f"{name} {number} {held.dtype} {tuple(held.shape)}", held.detach()


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _looks(model: PreTrainedModel) -> bytes:
    """Changes where weights do, as far as that can be seen quickly; empty: it cannot."""
    found = hashlib.sha256()
    for name, tensor in _tensors(model):
        if tensor.is_inference():  # torch counts no versions of these
            return b""
        found.update(f"{name} {tensor.data_ptr()} {tensor._version}".encode())
        if tensor.numel() and tensor.is_contiguous():
            step = max(1, tensor.numel() // _SAMPLES)
            found.update(_bytes_of(tensor.reshape(-1)[::step]))
    return found.digest()


def _plain_attributes(model: PreTrainedModel) -> list[object]:
    """The class of every module, and after it the names and values of its plain attributes.

    Left out: names that begin with an underscore, where libraries keep what they count; None, which
    a forward pass replaces with what it keeps. Every call asks, so this is the quick part:
    :func:`_digest_of` does the rest where something changed.
    """
    found: list[object] = []
    seen: set[torch.nn.Module] = set()
    waiting: list[torch.nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        own = tuple(vars(module).items())  # at once, as other threads may set some
        found.append(type(module))
        found += [pair for pair in own if type(pair[1]) in _PLAIN and pair[0][:1] != "_"]
        waiting += module._modules.values()
    return found


def _digest_of(plain: list[object]) -> str:
    """Without functions of this package, which differ with how a model is offloaded."""
    found = hashlib.sha256()
    for each in plain:
        name, value = each if isinstance(each, tuple) else ("", each)
        text = repr(value)
        if isinstance(value, _NAMED):
            text = f"{value.__module__}.{value.__qualname__}"
        if name not in _PLACES and not (name and text.startswith("cxl_offload.")):
            found.update(f"{name}={text}\n".encode())
    return found.hexdigest()[:32]


def _weights_digest(model: PreTrainedModel) -> str:
    found = xxhash.xxh3_128()
    for name, tensor in _tensors(model):
        if tensor.is_meta:
            raise ConfigError(
                f"prefixes of {type(model).__name__} cannot be kept: {name.split()[0]} is not in "
                "memory"
            )
        found.update(name.encode())
        if tensor.numel():
            found.update(_bytes_of(tensor))
    return found.hexdigest()
