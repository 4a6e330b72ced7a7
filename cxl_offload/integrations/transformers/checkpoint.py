"""What a model is loaded from, and whether transformers can load it here; asked before it does."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GgufConfig,
    PreTrainedModel,
)
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AutoHfQuantizer

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.model_folder import base_of_adapter
from cxl_offload.integrations.transformers.bitsandbytes_weights import PACKAGE as BITSANDBYTES
from cxl_offload.integrations.transformers.config_checks import GGUF, check_sizes, described_by
from cxl_offload.integrations.transformers.int4_checkpoints import METHODS as INT4_METHODS
from cxl_offload.integrations.transformers.int4_checkpoints import as_ours
from cxl_offload.integrations.transformers.read_errors import UNREADABLE, first_line

_LATE = "compressed-tensors"
"""Weights that transformers decompresses in the first forward pass, unless it is told to before."""

_NO_WEIGHTS = frozenset({"kv", "activations"})


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A folder as transformers saves it, or a GGUF file in a folder.

    Parameters
    ----------
    folder
        What transformers calls the model's path.
    gguf_file
        Name of the file in it; None: the folder's own.
    adapter
        Folder of a PEFT adapter for that model; None: the model as it is.
    """

    folder: Path
    gguf_file: str | None = None
    adapter: Path | None = None

    @classmethod
    def at(cls, path: str | Path) -> ModelFiles:
        """The files that a path names.

        Raises
        ------
        ConfigError
            Neither a folder with a ``config.json``, nor one of an adapter, nor a GGUF file.
        """
        path = Path(path)
        if path.suffix == GGUF and path.is_file():
            return cls(path.parent, path.name)
        if (base := base_of_adapter(path)) is not None:
            return replace(cls.at(base), adapter=path)
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"{path}: no config.json; give the folder of a checkpoint, or a GGUF file"
            )
        return cls(path)

    @property
    def path(self) -> Path:
        """What the user named."""
        return self.folder / (self.gguf_file or "")

    @property
    def described_in(self) -> Path:
        """The file that says what the model is."""
        return self.folder / (self.gguf_file or "config.json")

    def options(self) -> dict[str, Any]:
        """What every ``from_pretrained`` is told, beside the folder."""
        options: dict[str, Any] = {"local_files_only": True}
        return options if self.gguf_file is None else {**options, "gguf_file": self.gguf_file}

    def config(self) -> Any:
        """The configuration, of a quantized checkpoint with what loading it to its place needs.

        Raises
        ------
        ConfigError
            One line: not readable, or quantized in a way that transformers cannot load here.
        """
        check_sizes(self.described_in)
        with described_by(self.described_in):
            config = AutoConfig.from_pretrained(self.folder, **self.options())
        given = getattr(config, "quantization_config", None)
        if isinstance(given, dict) and given.get("quant_method") in INT4_METHODS:
            config.quantization_config = as_ours(self.folder, given)
        elif isinstance(given, dict):
            self._check_quantizer(given)
            if given.get("quant_method") == _LATE:
                config.quantization_config = {**given, "dequantize": True}
        return config

    def model_options(self, config: Any) -> dict[str, Any]:
        """What loading the model is told besides, so that weights are final once they are there."""
        options = {**self.options(), "config": config}
        if self.gguf_file is not None:
            options["quantization_config"] = GgufConfig(dequantize=True)
        if _method(config) == BITSANDBYTES:
            options["device_map"] = {"": "cpu"}  # else it goes to the GPU where there is one
        return options

    def dtype(self, asked: torch.dtype | str) -> torch.dtype | str:
        """The type of weights: ``"auto"`` is that of the checkpoint, of a GGUF file float32."""
        return torch.float32 if asked == "auto" and self.gguf_file is not None else asked

    def _check_quantizer(self, given: dict[str, Any]) -> None:
        method = given.get("quant_method")
        try:
            if AutoHfQuantizer.supports_quant_method(given):
                asked = copy.deepcopy(given)
                quantizer = AutoHfQuantizer.from_config(asked, pre_quantized=True)
                quantizer.validate_environment(device_map=None, weights_only=True)
                return
            why = f"it knows {', '.join(sorted(AUTO_QUANTIZER_MAPPING))}"
        except UNREADABLE as error:
            why = first_line(error)
        raise ConfigError(
            f"{self.path} is quantized by {method}, which transformers cannot load here: {why}"
        )


def auto_class(config: Any) -> Any:
    """Who makes the model of a configuration: also a decoder inside of one that sees."""
    sees = type(config) in AutoModelForImageTextToText._model_mapping
    is_text = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForImageTextToText if sees and not is_text else AutoModelForCausalLM


def _method(config: Any) -> str:
    """How a checkpoint is quantized; empty: it is not."""
    given = getattr(config, "quantization_config", None)
    found = given if isinstance(given, dict) else vars(given or object)
    method = found.get("quant_method") or ""
    return str(getattr(method, "value", method))


def check_final_weights(model: PreTrainedModel, kinds: Collection[str]) -> None:
    """Refuses to place weights that are not there, or are still to be decompressed elsewhere.

    Raises
    ------
    ConfigError
        Says how to load them.
    """
    if _NO_WEIGHTS.issuperset(kinds):
        return
    if all(weight.is_meta for weight in model.parameters()):
        raise ConfigError(
            f"the weights of {type(model).__name__} are on meta, where they have no numbers; load "
            "them first"
        )
    if _method(model.config) != _LATE:
        return
    if any(getattr(each, "quantization_status", "") == "compressed" for each in model.modules()):
        raise ConfigError(
            f"{type(model).__name__} decompresses its weights in the first forward pass, into "
            "ordinary memory; load it with this package's load(), or give from_pretrained() "
            "quantization_config=CompressedTensorsConfig(dequantize=True)"
        )
