"""Checkpoints of GPTQ and AWQ in 4 bits, whose layers the package's kernel computes.

transformers needs ``gptqmodel`` for them. Here their words are packed anew, once, for
:class:`~cxl_offload.integrations.transformers.int4_layers.Int4Linear`; transformers loads them by
a quantizer that is registered with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.int4_layers import Int4Linear, packed_rows
from cxl_offload.integrations.transformers.weight_files import keys_to_files
from cxl_offload.ops.int4_weight import Int4Weight, int4_from_awq, int4_from_gptq

METHODS = ("gptq", "awq")
OURS = "cxl_offload_int4"
"""What transformers is told of such a checkpoint instead."""

_CODES = ".qweight"
_ZEROS_OF = {"gptq": 1, "gptq_v2": 0}
"""What is added to stored zeros, by ``checkpoint_format``."""


def as_ours(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's quantization as :class:`Int4Config` takes it.

    Raises
    ------
    ConfigError
        One line: another number of bits, layout or group than the kernel has, or no layer.
    """
    method, bits = given.get("quant_method"), given.get("bits", given.get("w_bit"))
    group = given.get("group_size", given.get("q_group_size", 128))
    why = ""
    if bits != 4:
        why = f"{bits} bits; 4 are computed with"
    elif not isinstance(group, int) or (group != -1 and (group < 32 or group % 32)):
        why = f"groups of {group}; multiples of 32, or -1 for whole rows, are computed with"
    elif method == "gptq" and given.get("desc_act"):
        why = "columns in another order (desc_act); a checkpoint without it is computed with"
    elif method == "gptq" and given.get("checkpoint_format", "gptq") not in _ZEROS_OF:
        why = f"format {given['checkpoint_format']}; gptq and gptq_v2 are read"
    elif method == "awq" and str(given.get("version", "gemm")).lower() != "gemm":
        why = f"version {given['version']}; gemm is read"
    elif method == "awq" and not given.get("zero_point", True):
        why = "no zeros (zero_point); codes with zeros are read"
    if why:
        raise ConfigError(f"{path} is quantized by {method} in {why}")
    try:
        keys = keys_to_files(path)
    except ConfigError:
        raise
    except (OSError, ValueError, LookupError, SafetensorError) as error:
        raise ConfigError(f"{path}: no weights in safetensors files: {error}") from error
    layers = sorted(key.removesuffix(_CODES) for key in keys if key.endswith(_CODES))
    if not layers:
        raise ConfigError(f"{path} is quantized by {method}, but no layer has {_CODES[1:]}")
    offset = _ZEROS_OF[given.get("checkpoint_format", "gptq")] if method == "gptq" else 0
    return {
        "quant_method": OURS,
        "packing": method,
        "group_size": group,
        "zero_offset": offset,
        "layers": layers,
    }


@register_quantization_config(OURS)
class Int4Config(QuantizationConfigMixin):  # type: ignore[misc]
    """What :func:`as_ours` says, as transformers hands it to the quantizer."""

    def __init__(
        self,
        *,
        packing: str,
        group_size: int,
        zero_offset: int,
        layers: list[str],
        quant_method: str = OURS,
    ) -> None:
        self.quant_method = quant_method
        self.packing, self.group_size, self.zero_offset = packing, group_size, zero_offset
        self.layers = layers


class _Repack(ConversionOps):  # type: ignore[misc]
    """Words of a layer to the rows that :class:`Int4Linear` has."""

    def __init__(self, config: Int4Config) -> None:
        self._config = config

    def convert(
        self, input_dict: dict[str, Any], model: nn.Module, full_layer_name: str, **_: Any
    ) -> dict[str, torch.Tensor]:
        given = {
            key: each[0] if isinstance(each, list) else each for key, each in input_dict.items()
        }
        layer: Any = model.get_submodule(full_layer_name.rpartition(".")[0])
        order = given.get("g_idx")
        if order is not None and not torch.equal(
            order.long(), torch.arange(layer.in_features) // layer.group
        ):
            raise ValueError("columns are in another order (g_idx), which is not computed with")
        packed = packed_rows(self._read(given))
        if packed.shape != layer.weight.shape:
            raise ValueError(f"rows {tuple(packed.shape)}, not {tuple(layer.weight.shape)}")
        return {"weight": packed}

    def _read(self, given: Mapping[str, torch.Tensor]) -> Int4Weight:
        words = given["qweight"], given["qzeros"], given["scales"]
        if self._config.packing == "awq":
            return int4_from_awq(*words)
        return int4_from_gptq(*words, zero_offset=self._config.zero_offset)


@register_quantizer(OURS)
class Int4Quantizer(HfQuantizer):  # type: ignore[misc]
    """Gives a model the layers, and the loader what their words become."""

    requires_calibration = True
    quantization_config: Int4Config

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        config = self.quantization_config
        with torch.device("meta"):
            for name in config.layers:
                model.set_submodule(name, _layer_for(model, name, config.group_size))

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **_: Any
    ) -> PreTrainedModel:
        return model

    def get_weight_conversions(self) -> list[WeightConverter]:
        """What the loader does with the tensors of a layer."""
        return [
            WeightConverter(
                source_patterns=["qweight", "qzeros", "scales", "g_idx"],
                target_patterns="weight",
                operations=[_Repack(self.quantization_config)],
            )
        ]

    def is_serializable(self) -> bool:
        """Nobody else reads such rows."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Codes are not trained."""
        return False


def _layer_for(model: PreTrainedModel, name: str, group: int) -> Int4Linear:
    try:
        stock = model.get_submodule(name)
    except AttributeError:
        raise ConfigError(
            f"{type(model).__name__} has no layer {name} of its own, which the checkpoint has in "
            "4 bits (experts are one tensor in transformers 5); such a model is not read"
        ) from None
    if type(stock) is not nn.Linear:
        raise ConfigError(
            f"{name} is a {type(stock).__name__}; 4 bits are read of torch's Linear only"
        )
    group = stock.in_features if group == -1 else group
    if stock.in_features % group or group % 32:
        raise ConfigError(f"{name} has rows of {stock.in_features}, no groups of {group}")
    return Int4Linear(
        stock.in_features,
        stock.out_features,
        group,
        bias=stock.bias is not None,
        dtype=stock.weight.dtype,
    )
