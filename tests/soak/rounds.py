"""The kinds of rounds. Each is imported when its first turn comes, as torch is slow to import."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable

Round = Callable[[int, float], "Counter[str]"]
"""Seed and seconds to what was counted; raises where something is wrong."""

ROUNDS: dict[str, str] = {
    "simulated": "memory.simulated_round",
    "linux": "memory.linux_round",
    "model": "memory.model_round",
    "fork": "memory.fork_round",
    "training": "training.training_round",
    "generation": "generation.generation_round",
    "vllm": "serving.vllm_round",
}


def round_of(kind: str) -> Round:
    module, _, name = ROUNDS[kind].partition(".")
    found: Round = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    return found
