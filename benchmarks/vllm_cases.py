"""What bench_vllm_kv.py serves and asks: the model's size, the loads, the servers' options."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from benchmarks.grid import CELLS, ROWS
from benchmarks.vllm_load import Load

HIDDEN, BLOCK_TOKENS = 768, 32
BYTES_OF = {"bfloat16": 2, "float32": 4}
"""Of a number, by the types that a server may compute in."""

REUSE = "conversations, shared prefix"
NEVER = "prompts that never come back"
LOADS = {
    REUSE: Load(
        conversations=12,
        turns=3,
        shared=256,
        document=1024,
        message=64,
        answer=32,
        generate=8,
        clients=2,
    ),
    NEVER: Load(
        conversations=12,
        turns=1,
        shared=0,
        document=1280,
        message=64,
        answer=0,
        generate=8,
        clients=2,
    ),
}
NONE, ONE, TWO, KEPT = "no offload", "one tier", "two tiers", "two tiers, kept"
AGAIN = "no offload, again"
"""A second server without: what it differs by from the first one tells nothing of offloading."""
WITHOUT = (NONE, AGAIN)
KEPT_NAME = f"benchmark-{os.getpid()}"


@dataclass(frozen=True, slots=True)
class Served:
    """The model: a random LLaMA of so many layers, and what its servers compute in."""

    layers: int = 8
    dtype: str = "bfloat16"

    @property
    def token_bytes(self) -> int:
        """Of KV."""
        return self.layers * self.layer_token_bytes

    @property
    def layer_token_bytes(self) -> int:
        """Of KV of one layer."""
        return 2 * (HIDDEN // 128) * 64 * BYTES_OF[self.dtype]

    def describe(self) -> dict[str, Any]:
        """For the document."""
        size = {"layers": self.layers, "hidden": HIDDEN}
        return {**size, "dtype": self.dtype, "kv_bytes_per_token": self.token_bytes}


@dataclass(frozen=True, slots=True)
class Setting:
    """What is asked, and of how large servers.

    Attributes
    ----------
    loads
        By name.
    cache_blocks
        Of the KV cache.
    sequences
        That a server computes at once, at most.
    tier_tokens
        For whose KV the tiers are made.
    compared
        Conversations whose answers are compared: more than the KV cache holds, so that the second
        time they come from the tiers.
    """

    loads: dict[str, Load]
    cache_blocks: int
    sequences: int
    tier_tokens: int
    compared: int

    @property
    def cache_tokens(self) -> int:
        return self.cache_blocks * BLOCK_TOKENS


def cell_load(rows: int, tokens: int) -> Load:
    """Prompts that never come back, so many under way at once; at least eight of them."""
    return Load(
        conversations=rows * max(1, 8 // rows),
        turns=1,
        shared=0,
        document=tokens - 8,
        message=8,
        answer=0,
        generate=8,
        clients=rows,
    )


GRID_LOADS = {name: cell_load(*cell) for name, cell in CELLS.items()}
TWO_LOADS = Setting(
    LOADS,
    cache_blocks=128,
    sequences=4,
    tier_tokens=LOADS[REUSE].working_set_tokens,
    compared=6,
)
GRID = Setting(
    GRID_LOADS,
    cache_blocks=576,  # 32 rows of 512 tokens and an answer
    sequences=max(ROWS),
    tier_tokens=max(load.working_set_tokens for load in GRID_LOADS.values()),
    compared=26,
)


def tiers_of(name: str, working_set_bytes: int) -> dict[str, Any] | None:
    """Options of the connector; None for no offload."""
    if name in WITHOUT:
        return None
    extra: dict[str, Any] = {"spec_name": "cxl", "policy": "bind:0"}
    if name == ONE:
        return extra | {"cpu_bytes_to_use": 4 * working_set_bytes}
    # the hot tier holds a third of what comes back, so that most is brought from the cold one
    cold: dict[str, Any] = {"bytes": 4 * working_set_bytes, "policy": "bind:0"}
    if name == KEPT:
        cold["persist"] = KEPT_NAME
    return extra | {"cpu_bytes_to_use": working_set_bytes // 3, "cold": cold}


def flags_of(name: str, setting: Setting, served: Served) -> list[str]:
    flags = ["--enforce-eager", "--dtype", served.dtype, "--max-num-seqs", str(setting.sequences)]
    flags += ["--max-model-len", "2048", "--block-size", str(BLOCK_TOKENS)]
    flags += ["--num-gpu-blocks-override", str(setting.cache_blocks)]
    extra = tiers_of(name, setting.tier_tokens * served.token_bytes)
    if extra is not None:
        connector = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        flags += ["--kv-transfer-config", json.dumps(connector)]
    return flags
