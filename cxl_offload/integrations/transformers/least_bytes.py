"""What the weights of a quantized checkpoint take at least, by the headers of its files."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from cxl_offload.integrations.transformers.kinds import kind_of_weight
from cxl_offload.integrations.transformers.weight_files import keys_to_files

_CODE_BITS = {"U8": 8, "I8": 8, "I32": 32, "I64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8}
"""Types of codes and of words of them, which nobody makes smaller. Scales may become so."""
_LAYER = re.compile(r"(.*?\.\d+)\.")


def least_bytes(model: PreTrainedModel, folder: Path) -> dict[str, int]:
    """Bytes of every kind of weight that are taken for certain; nothing where no header says so.

    Parameters
    ----------
    model
        Without its weights, and with layers that are not quantized. A weight that it has by a name
        of the file, and that is no code there, takes what it takes in the model.
    folder
        Of files of safetensors. Tensors of layers that the model does not have are not counted.
    """
    tied = getattr(model, "all_tied_weights_keys", {})
    plain = {name: weight.nbytes for name, weight in model.named_parameters()}
    modules = {name for name, _ in model.named_modules()}
    found: Counter[str] = Counter()
    for name, (dtype, shape) in _headers(folder).items():
        layer = _LAYER.match(name)
        kind = kind_of_weight(name, tied)
        stacked = kind == "experts" and layer is not None and layer.group(1) in modules
        if dtype in _CODE_BITS and (stacked or name.rpartition(".")[0] in modules):
            found[kind] += math.prod(shape) * _CODE_BITS[dtype] // 8
        elif dtype not in _CODE_BITS:
            found[kind] += plain.get(name, 0)
    return {kind: count for kind, count in found.items() if count}


def _headers(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Type and shape of every tensor in a folder's files; none where they cannot be read."""
    found: dict[str, tuple[str, list[int]]] = {}
    try:
        names: dict[str, list[str]] = {}
        for key, file in keys_to_files(folder).items():
            names.setdefault(file, []).append(key)
        for file, keys in names.items():
            with safe_open(folder / file, framework="pt") as opened:
                for key in keys:
                    part = opened.get_slice(key)
                    found[key] = part.get_dtype(), part.get_shape()
    except (OSError, ValueError, LookupError, SafetensorError):
        return {}  # loading says what is wrong with them
    return found
