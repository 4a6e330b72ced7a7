"""Runs one vLLM engine in a process of its own: ``python -m tests.integrations.vllm.engine``.

One engine takes 12 to 20 seconds to start, so each run makes as many observations as it can; the
tests judge them. The request comes as JSON on standard input; the answer is the last line.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import cxl_offload.memory
from tests.integrations.vllm.tiny_model import prompt

Answer = dict[str, Any]


class Engine:
    """A vLLM engine over the tiny model, inside this process unless told otherwise."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        settings: dict[str, Any] = {
            "enforce_eager": True,
            "max_model_len": 512,
            "dtype": "bfloat16",
            "max_num_seqs": 4,
            "block_size": 32,
            "seed": 0,
            "disable_log_stats": False,
        }
        self.llm = LLM(model, **(settings | options))
        self._sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)

    def ask(self, *seeds: int) -> list[Answer]:
        """Tokens for the prompts of these seeds, and how many of each prompt were cached."""
        prompts = [{"prompt_token_ids": prompt(seed)} for seed in seeds]
        outputs = self.llm.generate(prompts, self._sampling, use_tqdm=False)
        return [
            {"tokens": list(each.outputs[0].token_ids), "cached": each.num_cached_tokens}
            for each in outputs
        ]

    def forget(self) -> bool:
        """Drops the prefix cache of the accelerator; the pool keeps what it has."""
        return bool(self.llm.reset_prefix_cache())


def worker() -> Any:
    """The copy worker of an engine inside this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().connector_worker.worker


def pool() -> Answer:
    """Where the pages of the pool are, and how large it is."""
    region = worker().region.region
    placement = region.placement()
    return {
        "granted": {str(node): count for node, count in placement.granted.items()},
        "nbytes": region.nbytes,
        "named": region.path.exists(),
        "worker": type(worker()).__name__,
    }


def damage() -> None:
    """Every chunk of the pool gets the bytes of another one."""
    region = worker().region
    rows = region._base.view(region.num_chunks, -1)
    rows.copy_(rows.roll(1, 0))


def plain(engine: Engine) -> Answer:
    """The answers that every other run must give."""
    return {"answers": engine.ask(*range(6))}


def reuse(engine: Engine) -> Answer:
    """Prompts again after the prefix cache is gone, then over a damaged pool."""
    first = engine.ask(0, 1, 2, 3)
    forgotten = [engine.forget()]
    again = engine.ask(0, 1, 2, 3)
    forgotten.append(engine.forget())
    alone = [engine.ask(seed)[0] for seed in (3, 1)]
    forgotten.append(engine.forget())
    found = pool()
    damage()
    damaged = engine.ask(0, 1, 2, 3)
    return {
        "first": first,
        "again": again,
        "alone": alone,
        "damaged": damaged,
        "forgotten": forgotten,
        "pool": found,
        "counters": counters(engine),
    }


def tiers(engine: Engine) -> Answer:
    """Working sets larger than the hot tier: what it drops comes back from the cold one."""
    seeds = range(6)
    first = [engine.ask(seed)[0] for seed in seeds]
    engine.forget()
    second = [engine.ask(seed)[0] for seed in seeds]
    engine.forget()
    together = engine.ask(*seeds)
    engine.forget()
    found = counters(engine)
    cold = cold_tier(engine)
    rows = np_rows(cold)
    rows[:] = np.roll(rows, 1, 0)
    damaged = [engine.ask(seed)[0] for seed in seeds]
    engine.llm.reset_prefix_cache(reset_connector=True)
    after = [engine.ask(seed)[0] for seed in seeds]
    memory = cxl_offload.memory.active()
    place = memory.placement(cold.memory.address, cold.memory.nbytes)
    return {
        "first": first,
        "second": second,
        "together": together,
        "damaged": damaged,
        "after": after,
        "counters": found,
        "slots": cold.slots,
        "granted": {str(node): count for node, count in place.granted.items()},
        "pool": pool(),
    }


def cold_tier(engine: Engine) -> Any:
    """The cold tier of an engine inside this process."""
    core = engine.llm.llm_engine.engine_core.engine_core
    return core.scheduler.connector.connector_scheduler.manager.secondary_tiers[0]


def np_rows(tier: Any) -> Any:
    """The memory of a tier, one row a slot."""
    return np.from_dlpack(tier.memory).reshape(tier.slots, -1)


def counters(engine: Engine) -> dict[str, float]:
    """Our counters as vLLM's Prometheus registry has them, by event and tier."""
    found = {}
    for metric in engine.llm.get_metrics():
        _, ours, rest = metric.name.partition("cxl_offload_kv_")
        if ours:
            found[f"{rest.removesuffix('_chunks')} {metric.labels['tier']}"] = metric.value
    return found


def refusals(model: str, options: list[Answer]) -> Answer:
    """What vLLM says to each of these engine options, before it makes an engine."""
    from vllm.engine.arg_utils import EngineArgs

    said = []
    for each in options:
        try:
            EngineArgs(model=model, **each).create_engine_config()
            said.append("")
        except Exception as error:
            said.append(str(error))
    return {"said": said}


SCENARIOS: dict[str, Callable[[Engine], Answer]] = {"plain": plain, "reuse": reuse, "tiers": tiers}


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    request = json.load(sys.stdin)
    os.environ.update(request.get("environment", {}))
    if request["scenario"] == "refusals":
        answer = refusals(request["model"], request["options"]["each"])
    else:
        engine = Engine(request["model"], request["options"])
        answer = SCENARIOS[request["scenario"]](engine)
        engine.llm.llm_engine.engine_core.shutdown()
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
