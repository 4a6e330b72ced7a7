"""Weights that transformers puts together in ordinary memory, made where they are to lie instead.

It has no hook for any of these, so what it calls is replaced while a model is loaded: experts that
are stacked, tensors of a GGUF file, and layers that compressed-tensors decompresses.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, core_model_loading
from transformers.core_model_loading import Concatenate, MergeModulelist
from transformers.quantizers.quantizer_gguf import GgufHfQuantizer

from cxl_offload.errors import ConfigError

_DECOMPRESSED = "compressed_tensors.compressors.model_compressors.model_compressor"
_CONVERT = ["self", "layer_name", "model", "config", "hf_quantizer", "loading_info"]
_READ = ["self", "checkpoint_file", "model"]
_log = logging.getLogger(__name__)


class Places(Protocol):
    """Where weights of a model that is being loaded go."""

    def empty(
        self, model: nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Memory of a weight in its place; None: it has none of its own, or copies."""

    def fill(self, target: torch.Tensor, tensor: torch.Tensor) -> None:
        """Give memory of a place what was read; it is there when the model is loaded."""

    def place_layer(self, layer: nn.Module) -> None:
        """Move the weights of a layer that were made in ordinary memory."""


@contextlib.contextmanager
def made_in_place(places: Places) -> Iterator[None]:
    """In the block transformers loads with weights put together in their places."""
    with contextlib.ExitStack() as stack:
        _replace(stack, core_model_loading.WeightConverter, "convert", _CONVERT, _stacking(places))
        _replace(stack, GgufHfQuantizer, "get_state_dict", _READ, _reading(places))
        with contextlib.suppress(ImportError):
            compressor = importlib.import_module(_DECOMPRESSED)
            _replace(stack, compressor, "decompress_module", ["module"], _decompressing(places))
        yield


def _replace(
    stack: contextlib.ExitStack, owner: Any, name: str, parameters: list[str], new: Any
) -> None:
    """Until the stack ends; what is not there, or begins with other parameters, is left alone."""
    stock = getattr(owner, name, None)
    found = [] if stock is None else list(inspect.signature(stock).parameters)
    if found[: len(parameters)] != parameters:
        _log.warning(
            "%s.%s(%s) is not there, so weights that it makes are in ordinary memory first, and "
            "then moved; it is in transformers 5.19 and compressed-tensors 0.20",
            getattr(owner, "__name__", owner),
            name,
            ", ".join(parameters),
        )
        return
    setattr(owner, name, new(stock))
    stack.callback(setattr, owner, name, stock)


def _stacking(places: Places) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def around(stock: Callable[..., Any]) -> Callable[..., Any]:
        def convert(
            converter: Any,
            layer_name: str,
            model: Any = None,
            config: Any = None,
            hf_quantizer: Any = None,
            loading_info: Any = None,
        ) -> Any:
            made = None
            if hf_quantizer is None and _only_stacks(converter):
                made = _stacked(converter, layer_name, model, places)
            if made is not None:
                return {layer_name: made}
            return stock(converter, layer_name, model, config, hf_quantizer, loading_info)

        return convert

    return around


def _only_stacks(converter: Any) -> bool:
    """Whether experts are stacked, and stacks of gates and others joined, and no more."""
    done = [type(each) for each in converter.operations]
    joined = [each.dim for each in converter.operations]
    read = [each for tensors in converter.collected_tensors.values() for each in tensors]
    return (
        converter.quantization_operation is None
        and (
            (done == [MergeModulelist] and joined == [0] and len(converter.source_patterns) == 1)
            or (done == [MergeModulelist, Concatenate] and joined == [0, 1])
        )
        and all(callable(each) and not isinstance(each, torch.Tensor) for each in read)
    )


def _stacked(converter: Any, name: str, model: nn.Module, places: Places) -> torch.Tensor | None:
    """A stack of experts, read one by one into its place; None: transformers is to do it."""
    found = dict(model.named_parameters()).get(name)
    collected: Mapping[str, list[Any]] = converter.collected_tensors
    parts = [collected[key] for key in converter.source_patterns if key in collected]
    if found is None or type(found) is not nn.Parameter or not parts:
        return None
    if any(len(each) != found.shape[0] for each in parts):
        return None
    first = parts[0][0]()
    if first is None or first.dim() != found.dim() - 1:
        return None
    rows = [first.shape[0], *(each[0]().shape[0] for each in parts[1:])]
    if (sum(rows), *first.shape[1:]) != tuple(found.shape[1:]):
        return None
    made = places.empty(model, name, tuple(found.shape), first.dtype)
    if made is None:
        return None
    del first
    at = 0
    for part, count in zip(parts, rows, strict=True):
        for number, read in enumerate(part):
            places.fill(made[number, at : at + count], read())
        at += count
    converter.collected_tensors.clear()
    return made


class _PlacedTensors(dict[str, torch.Tensor]):
    """Tensors of a file by the names of the model, each in its place as soon as it is there.

    transformers compares their shapes with the model's only where nothing is dequantized.
    """

    def __init__(
        self, file: str, model: PreTrainedModel, dtype: torch.dtype | None, places: Places
    ) -> None:
        super().__init__()
        self._file, self._model, self._dtype, self._places = file, model, dtype, places
        self._shapes = {each: tuple(weight.shape) for each, weight in model.named_parameters()}

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        shape = tuple(tensor.shape)
        if shape != self._shapes.get(name, shape):
            raise ConfigError(
                f"{self._file}: {name} is {shape} there, and {self._shapes[name]} in the model"
            )
        made = None
        if self._dtype in (None, tensor.dtype):
            made = self._places.empty(self._model, name, tuple(tensor.shape), tensor.dtype)
        super().__setitem__(name, tensor if made is None else made.copy_(tensor))


def _reading(places: Places) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def around(stock: Callable[..., Any]) -> Callable[..., Any]:
        def get_state_dict(quantizer: Any, checkpoint_file: str, model: PreTrainedModel) -> Any:
            if quantizer.supported:  # transformers reads these one by one itself
                return stock(quantizer, checkpoint_file, model)
            placed = _PlacedTensors(checkpoint_file, model, quantizer.dtype, places)
            return _read_gguf(checkpoint_file, model, quantizer.dtype, placed)

        return get_state_dict

    return around


def _read_gguf(
    file: str, model: PreTrainedModel, dtype: torch.dtype | None, tensors: _PlacedTensors
) -> _PlacedTensors:
    """As transformers' ``load_gguf_checkpoint`` does it, into a dict of our own."""
    gguf: Any = importlib.import_module("gguf")
    stock: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    parsed = {**stock.load_gguf_checkpoint(file, return_tensors=False), "tensors": tensors}
    reader = gguf.GGUFReader(file)
    architecture = stock.read_field(reader, "general.architecture")[0]
    chosen = stock.TENSOR_PROCESSORS.get(architecture, stock.TensorProcessor)
    processor = chosen(config=parsed.get("config", {}))
    names = stock.get_gguf_hf_weights_map(model, processor)
    for each in reader.tensors:
        try:
            name, read = _read_tensor(gguf, each, processor, {"parsed_parameters": parsed}, names)
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{file}: {each.name}: {error}") from error
        if name in names:
            tensors[names[name]] = read if dtype is None else read.to(dtype)
        del read  # before the next one is there
    return tensors


def _read_tensor(
    gguf: Any, tensor: Any, processor: Any, options: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[str | None, torch.Tensor]:
    """A tensor of a GGUF file as numbers, and its name there; None: the processor has stored it."""
    result = processor.process(
        weights=gguf.dequantize(tensor.data, tensor.tensor_type),
        name=tensor.name,
        tensor_key_mapping=names,
        **options,
    )
    weights = np.ascontiguousarray(result.weights)
    if not weights.flags.writeable:  # the file's own pages
        weights = weights.copy()
    return result.name, torch.from_numpy(weights)


def _decompressing(places: Places) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def around(stock: Callable[..., Any]) -> Callable[..., Any]:
        def decompress(module: nn.Module, *options: Any, **named: Any) -> Any:
            made = stock(module, *options, **named)
            places.place_layer(module)
            return made

        return decompress

    return around
