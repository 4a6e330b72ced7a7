"""What bench_vllm_kv.py serves and asks: the model's size, the loads, the servers' options."""

from __future__ import annotations

import json
import os
from typing import Any

from benchmarks.vllm_load import Load

LAYERS, HIDDEN, BLOCK_TOKENS = 8, 768, 32
BYTES_PER_TOKEN = LAYERS * 2 * (HIDDEN // 128) * 64 * 2
CACHE_BLOCKS = 128
CACHE_TOKENS = CACHE_BLOCKS * BLOCK_TOKENS

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
KEPT_NAME = f"benchmark-{os.getpid()}"


def tiers_of(name: str, working_set_bytes: int) -> dict[str, Any] | None:
    """Options of the connector; None for no offload."""
    if name == NONE:
        return None
    extra: dict[str, Any] = {"spec_name": "cxl", "policy": "bind:0"}
    if name == ONE:
        return extra | {"cpu_bytes_to_use": 4 * working_set_bytes}
    # the hot tier holds a third of what comes back, so that most is brought from the cold one
    cold: dict[str, Any] = {"bytes": 4 * working_set_bytes, "policy": "bind:0"}
    if name == KEPT:
        cold["persist"] = KEPT_NAME
    return extra | {"cpu_bytes_to_use": working_set_bytes // 3, "cold": cold}


def flags_of(name: str, working_set_bytes: int) -> list[str]:
    flags = ["--enforce-eager", "--dtype", "bfloat16", "--max-num-seqs", "4"]
    flags += ["--max-model-len", "2048", "--block-size", str(BLOCK_TOKENS)]
    flags += ["--num-gpu-blocks-override", str(CACHE_BLOCKS)]
    extra = tiers_of(name, working_set_bytes)
    if extra is not None:
        connector = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        flags += ["--kv-transfer-config", json.dumps(connector)]
    return flags
