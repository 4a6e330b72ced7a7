"""Types that vLLM keeps keys and values in beside the model's own (``--kv-cache-dtype``)."""

from __future__ import annotations

from cxl_offload.errors import ConfigError
from cxl_offload.plan.kv_types import KV_TYPES, kv_type_remedy

VLLM_KV_DTYPES = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
"""This package's name of a type to vLLM's; vLLM has no 4-bit cache."""

_ANY_DIM = 128
"""Of a head; both types have one byte a number, whatever the dimension, where half precision has
two."""


def check_kv_dtype(name: str) -> None:
    """Refuses what is no type of keys and values, and what vLLM does not have.

    Raises
    ------
    ConfigError
        With what to write instead.
    """
    if name not in KV_TYPES:
        raise ConfigError(f"kv dtype {name!r}: {kv_type_remedy(name)}")
    if name not in VLLM_KV_DTYPES:
        raise ConfigError(f"kv dtype {name}: vLLM has {' and '.join(VLLM_KV_DTYPES)}; name one")


def kv_share(name: str) -> float:
    """Bytes of keys and values over those in half precision; of no name: 1."""
    return KV_TYPES[name].row_bytes(_ANY_DIM) / (2 * _ANY_DIM) if name else 1.0


def kv_flags(name: str) -> tuple[str, ...]:
    """Of vLLM's server."""
    return ("--kv-cache-dtype", VLLM_KV_DTYPES[name]) if name else ()


def kv_notes(name: str) -> list[str]:
    """What the reader must know of the type."""
    if not name:
        return []
    return [
        f"keys and values in {VLLM_KV_DTYPES[name]}, which loses precision; not every GPU and "
        "attention backend of vLLM takes it"
    ]
