"""States of optimizers in 8 bits: what a code is worth, and checkpoints with and without codes.

128 elements in a row share a scale, a power of two, kept as the exponent of a float32 (0: all of
them are zero; 255: one is not finite). A first moment has a sign and 7 bits, a second moment is
kept as its root in 8 bits; see docs/adam.md. Steps round at random
(``csrc/kernels/update_states.inc.h``), the functions here to the nearest.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch

from cxl_offload.core import STATE_BLOCK as BLOCK

Code = Literal["signed", "root"]
"""How a state is kept: with a sign, or its root."""

CODES, SCALES = "_codes", "_scales"
"""What the names of a state's two tensors end with."""

_LEAST = 112 << 23
"""The bits of 2^-15, where codes begin."""
_AT_ONCE = 1 << 15
"""Blocks that are converted at a time, so that little memory is needed besides."""


def scale_count(numel: int) -> int:
    """Scales of a state of so many elements."""
    return -(-numel // BLOCK)


def encoded(values: torch.Tensor, code: Code) -> tuple[torch.Tensor, torch.Tensor]:
    """A state in 8 bits, rounded to the nearest.

    Parameters
    ----------
    values
        Any shape and floating-point type, on the CPU; for ``"root"`` not negative.

    Returns
    -------
    tuple
        Codes of the same shape, and one scale a block; both uint8.

    Raises
    ------
    ValueError
        A second moment is negative: no optimizer makes such a one.
    """
    flat = values.detach().reshape(-1)
    if code == "root" and bool((flat < 0).any()):
        raise ValueError("a second moment (exp_avg_sq) has negative elements: it is damaged")
    codes = torch.empty(flat.numel(), dtype=torch.uint8, device="cpu")
    scales = torch.empty(scale_count(flat.numel()), dtype=torch.uint8, device="cpu")
    for at, blocks in _pieces(flat.float() if flat.dtype is torch.float64 else flat):
        made, exponents = _encode(blocks, code)
        codes[at * BLOCK : (at + len(blocks)) * BLOCK] = made.reshape(-1)[
            : flat.numel() - at * BLOCK
        ]
        scales[at : at + len(blocks)] = exponents
    return codes.view(values.shape), scales


def decoded(codes: torch.Tensor, scales: torch.Tensor, code: Code) -> torch.Tensor:
    """The float32 values of a state in 8 bits, in the shape of its codes.

    Raises
    ------
    ValueError
        Not uint8, or not one scale a block.
    """
    _check_coded(codes, scales)
    flat = codes.reshape(-1)
    values = torch.empty(flat.numel(), dtype=torch.float32, device="cpu")
    for at, blocks in _pieces(flat):
        made = _decode(blocks, scales[at : at + len(blocks)], code)
        values[at * BLOCK : (at + len(blocks)) * BLOCK] = made.reshape(-1)[
            : flat.numel() - at * BLOCK
        ]
    return values.view(codes.shape)


def _check_coded(codes: object, scales: object) -> None:
    tensors = (codes, scales)
    if not all(isinstance(each, torch.Tensor) and each.dtype is torch.uint8 for each in tensors):
        kinds = " and ".join(str(getattr(each, "dtype", type(each).__name__)) for each in tensors)
        raise ValueError(f"a state of 8 bits has codes and scales of {kinds}; both must be uint8")
    assert isinstance(codes, torch.Tensor)
    assert isinstance(scales, torch.Tensor)
    if scales.shape != (scale_count(codes.numel()),):
        raise ValueError(
            f"a state of 8 bits has {codes.numel()} codes and scales {tuple(scales.shape)}; there "
            f"must be {scale_count(codes.numel())}, one for {BLOCK} codes"
        )


def _pieces(flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Some blocks at a time, one a row, with the number of the first; the last filled up with 0."""
    for at in range(0, scale_count(flat.numel()), _AT_ONCE):
        part = flat[at * BLOCK : (at + _AT_ONCE) * BLOCK]
        whole = part.new_zeros(scale_count(part.numel()) * BLOCK)
        whole[: part.numel()] = part
        yield at, whole.view(-1, BLOCK)


def _encode(blocks: torch.Tensor, code: Code) -> tuple[torch.Tensor, torch.Tensor]:
    values = blocks.float()
    if code == "root":
        values = values.sqrt()
    bits = values.view(torch.int32)
    greatest = (bits & 0x7FFFFFFF).amax(1)
    exponents = (greatest + (0x100100 if code == "signed" else 0x80000)) >> 23
    exponents = torch.where(exponents >= 254, 255, exponents)
    empty = (exponents == 0) | (exponents == 255)
    inverse = torch.where(empty, 0, (254 - exponents) << 23).int().view(torch.float32)
    scaled = values.abs() * inverse[:, None]
    if code == "signed":
        rounded = (scaled + 2.0**-15).view(torch.int32) + (1 << 19)
        made = (rounded >> 20) - (_LEAST >> 20) | (bits >> 24 & 0x80)
    else:
        rounded = scaled.clamp(min=2.0**-15).view(torch.int32) + (1 << 18)
        made = (rounded >> 19) - (_LEAST >> 19)
    made.masked_fill_(empty[:, None], 0)
    return made.to(torch.uint8), exponents.to(torch.uint8)


def _decode(blocks: torch.Tensor, scales: torch.Tensor, code: Code) -> torch.Tensor:
    bits, scale = blocks.int(), (scales.int() << 23).view(torch.float32)[:, None]
    if code == "root":
        return ((_LEAST + (bits << 19)).view(torch.float32) * scale).square()
    sizes = ((_LEAST + ((bits & 0x7F) << 20)).view(torch.float32) - 2.0**-15) * scale
    return torch.where(bits >= 0x80, -sizes, sizes)


def has_codes(values: Mapping[str, Any]) -> bool:
    """Whether the states of a parameter are in 8 bits."""
    return any(str(name).endswith((CODES, SCALES)) for name in values)


_CODES_OF: dict[str, Code] = {"exp_avg": "signed", "exp_avg_sq": "root"}
"""The states that can be in 8 bits."""


def float_states(values: Mapping[str, Any]) -> dict[str, Any]:
    """The states of a parameter with those in 8 bits as float32 under their plain names."""
    made = {name: value for name, value in values.items() if not name.endswith((CODES, SCALES))}
    for name, code in _CODES_OF.items():
        parts = [name + CODES, name + SCALES]
        missing = [part for part in parts if part not in values]
        if len(missing) == 1:
            raise ValueError(f"a state of 8 bits has no {missing[0]}: the checkpoint is damaged")
        if not missing:
            codes, scales = (values[part] for part in parts)
            made[name] = decoded(codes, scales, code)
    return made


def float_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint of states in 8 bits as one of float32 states, for ``torch.optim.AdamW`` too.

    Parameters
    ----------
    state_dict
        What ``state_dict()`` of an optimizer gave. It is not changed; what has no codes is shared.

    Raises
    ------
    ValueError
        It is no such dict, or a state in it is damaged.
    """
    missing = [key for key in ("state", "param_groups") if key not in state_dict]
    if missing:
        raise ValueError(f"a state dict of an optimizer has {' and '.join(missing)}; this has not")
    states = {key: float_states(values) for key, values in state_dict["state"].items()}
    return {
        **state_dict,
        "state": states,
        "param_groups": copy.deepcopy(state_dict["param_groups"]),
    }


def of_peers(values: Mapping[str, Any]) -> dict[str, Any]:
    """The states of a parameter with those in the 8-bit forms of others as float32.

    bitsandbytes keeps for each state a table of 256 numbers (``qmap``), an index an element
    (``state``) and a factor for 256 elements (``absmax``), all in a dict of their own; torchao a
    tensor that has a ``codes`` and can ``dequantize()``.
    """
    made = dict(values)
    nested = made.pop("__bnb_optimizer_quant_state__", None)
    made |= nested if isinstance(nested, Mapping) else {}
    for number, name in (("1", "exp_avg"), ("2", "exp_avg_sq")):
        if isinstance(made.get("state" + number), torch.Tensor):
            index = made.pop("state" + number)
            made[name] = _by_table(index, *(made.pop(f"{k}{number}", None) for k in _TABLES))
    return {
        name: value.dequantize() if hasattr(value, "codes") and hasattr(value, "qmap") else value
        for name, value in made.items()
    }


_TABLES = ("qmap", "absmax")
_TABLE_BLOCK = 256


def _by_table(
    index: torch.Tensor, table: torch.Tensor | None, factors: torch.Tensor | None
) -> torch.Tensor:
    if index.is_floating_point():  # bitsandbytes keeps small parameters' states so
        return index
    numel = index.numel()
    blocks = -(-numel // _TABLE_BLOCK)
    if table is None or factors is None or (table.numel(), factors.numel()) != (256, blocks):
        raise ValueError(
            "load_state_dict: a state of bitsandbytes with another table than one of 256 numbers, "
            f"or other than {blocks} factors for {numel} elements; its block size must be 256"
        )
    numbers = table.float()[index.reshape(-1).long()]
    each = factors.reshape(-1).float().repeat_interleave(_TABLE_BLOCK)
    return (numbers * each[:numel]).view(index.shape)
