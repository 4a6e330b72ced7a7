"""A vLLM engine that serves for the length of a soak: ``python -m tests.soak.serve``.

It runs where vLLM is installed; see :func:`main` for its arguments. Commands come as lines of JSON
on standard input: ``expect`` asks for tokens, ``begin`` serves until ``stop`` comes.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import select
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

import cxl_offload.memory
from tests.integrations.vllm.engine import Engine, counters
from tests.integrations.vllm.inside import pool
from tests.integrations.vllm.tiny_model import prompt

from .left import Held

Asked = tuple[int, int]
"""Seed of a prompt, and how many tokens of it: shorter ones are prefixes of longer ones."""

LENGTHS = (70, 190, 300)
PROMPTS: list[Asked] = [(seed, length) for seed in range(10) for length in LENGTHS]
BUSY_SHARE = 0.5
"""Of the time; the rest is left to what else the soak does."""


class ServedEngine(Engine):
    """Asks prompts of several lengths, and knows what must not be held when all is quiet."""

    def tokens(self, asked: list[Asked]) -> list[tuple[list[int], int]]:
        prompts = [{"prompt_token_ids": prompt(seed)[:length]} for seed, length in asked]
        made = self.llm.generate(prompts, self._sampling, use_tqdm=False)
        return [(list(each.outputs[0].token_ids), each.num_cached_tokens or 0) for each in made]

    def blocks_in_use(self) -> int:
        """Blocks of the engine's own KV cache that a request holds; one is never given out."""
        core = self.llm.llm_engine.engine_core.engine_core
        blocks = core.scheduler.kv_cache_manager.block_pool
        return int(blocks.num_gpu_blocks - 1 - blocks.get_num_free_blocks())


class Stint:
    """Requests, aborts and damage at random, from one seed, until it is told to stop."""

    def __init__(self, engine: ServedEngine, seed: int, right: list[list[int]]) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.right = dict(zip(PROMPTS, right, strict=True))
        self.counts: Counter[str] = Counter()

    def step(self) -> None:
        draw = self.rng.random()
        if draw < 0.65:
            self.ask()
        elif draw < 0.82:
            seeds = self.rng.sample(range(20), self.rng.randint(1, 6))
            self.engine.abort_after(self.rng.randint(0, 12), *seeds)
            self.counts["aborted requests"] += len(seeds)
        elif draw < 0.90:
            self.counts["prefix caches dropped"] += self.engine.forget()
        else:
            self.damage()

    def ask(self) -> None:
        asked = self.rng.sample(PROMPTS, self.rng.randint(1, 5))
        for one, (tokens, cached) in zip(asked, self.engine.tokens(asked), strict=True):
            assert tokens == self.right[one], f"prompt {one}: {tokens} is not {self.right[one]}"
            self.counts["requests"] += 1
            self.counts["tokens compared"] += len(tokens)
            self.counts["prompt tokens found"] += cached

    def damage(self) -> None:
        """Flips a bit of the kept tier, whose checksums must find it."""
        cold = self.engine.manager().secondary_tiers[0]
        cold.drain_jobs()  # a chunk that is being copied has no checksum yet
        at = cold.memory.address + self.rng.randrange(cold.memory.nbytes)
        ctypes.c_uint8.from_address(at).value ^= 1
        self.counts["bits flipped"] += 1

    def check(self) -> None:
        """All is quiet, and nothing is held; the tiers' pages are where they were asked to be."""
        engine = self.engine
        assert engine.chunks_in_use() == [0, 0], f"chunks in use: {engine.chunks_in_use()}"
        assert engine.blocks_in_use() == 0, f"{engine.blocks_in_use()} blocks in use"
        cold = engine.manager().secondary_tiers[0]
        session = cxl_offload.memory.current_session()
        lies = dict(session.placement(cold.memory.address, cold.memory.nbytes).granted)
        assert lies == {0: cold.memory.nbytes}, f"pages of the cold tier: {lies}"
        hot = pool()
        assert hot["granted"] == {"0": hot["nbytes"]}, f"pages of the hot tier: {hot}"
        assert not hot["named"], "the hot tier's file still has its name"


def told() -> dict[str, Any]:
    """The next command; the end of the input is one too."""
    line = sys.stdin.readline()
    return json.loads(line) if line else {"do": "end"}


def is_told() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def serve(engine: ServedEngine, seed: int, right: list[list[int]]) -> dict[str, Any]:
    """Steps until a command comes; what was counted, and what the process held before and after."""
    stint = Stint(engine, seed, right)
    before, first = Held.now(), counters(engine)
    while not is_told():
        began = time.monotonic()
        stint.step()
        time.sleep((time.monotonic() - began) * (1 - BUSY_SHARE) / BUSY_SHARE)
    stint.check()
    engine.forget()
    last = counters(engine)
    for name, value in last.items():
        event, _, tier = name.partition(" ")
        if event in ("stored", "loaded", "evicted", "damaged", "refused"):
            stint.counts[f"{tier} chunks {event}"] += round(value - first.get(name, 0))
    return {"counts": stint.counts, "before": asdict(before), "after": asdict(Held.now())}


def main() -> None:
    """Arguments: the request (model and options) as JSON, and the file descriptor of answers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the soak's to answer
    request, out = json.loads(sys.argv[1]), int(sys.argv[2])

    def answer(found: dict[str, Any]) -> None:
        os.write(out, json.dumps(found).encode() + b"\n")

    engine = ServedEngine(request["model"], request["options"])
    answer({"ready": True})
    while (command := told())["do"] != "end":
        try:
            match command["do"]:
                case "expect":
                    answer({"tokens": [engine.tokens([one])[0][0] for one in PROMPTS]})
                case "begin":
                    answer(serve(engine, command["seed"], command["right"]))
        except AssertionError as error:
            answer({"wrong": str(error)})
            break
        except Exception as error:  # an answer, then the traceback in the log
            answer({"wrong": f"{type(error).__name__}: {error}"})
            raise
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
