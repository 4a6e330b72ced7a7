"""Runs one vLLM engine in a process of its own: ``python -m tests.integrations.vllm.engine``.

One engine takes 12 to 20 seconds to start, so each run makes as many observations as it can; the
tests judge them. The request comes as JSON on standard input; the answer is the last line.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import cxl_offload.memory
from tests.integrations.vllm.inside import copy_worker, damage, pool
from tests.integrations.vllm.tiny_model import DTYPE, prompt

Answer = dict[str, Any]


class Engine:
    """A vLLM engine over the tiny model, inside this process unless told otherwise."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        settings: dict[str, Any] = {
            "enforce_eager": True,
            "max_model_len": 512,
            "dtype": DTYPE,
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

    def abort_after(self, steps: int, *seeds: int) -> None:
        """Begins requests, and aborts them all after so many steps of the engine."""
        inner = self.llm.llm_engine
        names = [
            inner.add_request(
                f"aborted-{steps}-{seed}", {"prompt_token_ids": prompt(seed)}, self._sampling
            )
            for seed in seeds
        ]
        for _ in range(steps):
            inner.step()
        inner.abort_request(names)
        while inner.has_unfinished_requests():
            inner.step()

    def chunks_in_use(self) -> list[int]:
        """Chunks of each tier that nothing may evict, once all copies are done."""
        manager = self.manager()
        for _ in range(200):
            books = [manager.primary_tier, manager.secondary_tiers[0].books]
            held = [
                each._num_allocated_chunks - len(each._free_list) - each._num_evictable_cache_chunks
                for each in books
            ]
            if not any(held):
                break
            self.ask(9)
        return held

    def manager(self) -> Any:
        """vLLM's manager of the tiers, of an engine inside this process."""
        core = self.llm.llm_engine.engine_core.engine_core
        return core.scheduler.connector.connector_scheduler.manager


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
    cold = engine.manager().secondary_tiers[0]
    rows = np_rows(cold)
    rows[:] = np.roll(rows, 1, 0)
    damaged = [engine.ask(seed)[0] for seed in seeds]
    engine.llm.reset_prefix_cache(reset_connector=True)
    after = [engine.ask(seed)[0] for seed in seeds]
    session = cxl_offload.memory.current_session()
    place = session.placement(cold.memory.address, cold.memory.nbytes)
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


def parallel(engine: Engine) -> Answer:
    """Two ranks with one pool; then one of them is killed."""
    first = engine.ask(0, 1, 2, 3)
    engine.forget()
    again = engine.ask(0, 1, 2, 3)
    engine.forget()
    pools = engine.llm.collective_rpc(pool)
    engine.llm.collective_rpc(damage)
    damaged = engine.ask(0, 1, 2, 3)
    os.kill(pools[1]["pid"], signal.SIGKILL)
    try:
        engine.ask(5)
        said = ""
    except Exception as error:
        said = type(error).__name__
    return {"first": first, "again": again, "damaged": damaged, "pools": pools, "said": said}


def trouble(engine: Engine) -> Answer:
    """Tiers that are full, requests that are aborted, sleep, and at last a copy that fails."""
    seeds = range(6)
    answers = {"together": engine.ask(*seeds)}
    engine.forget()
    answers["full"] = engine.ask(*reversed(seeds))[::-1]
    for steps in range(8):
        engine.forget()
        engine.abort_after(steps, *seeds)
    engine.forget()
    answers["aborted"] = engine.ask(*seeds)
    engine.llm.sleep(level=1)
    engine.llm.wake_up()
    answers["slept"] = engine.ask(*seeds)
    answers["awake"] = [engine.ask(seed)[0] for seed in seeds]
    engine.forget()
    answers["alone"] = [engine.ask(seed)[0] for seed in seeds]
    in_use = engine.chunks_in_use()
    found = counters(engine)
    engine.forget()

    def broken(**lists: Any) -> None:
        raise OSError("injected")

    copy_worker()._loads._copier.copy_blocks = broken
    try:
        # Which of them the tiers still have depends on when copies between them ended.
        for seed in reversed(seeds):
            engine.ask(seed)
        said = ""
    except Exception as error:
        said = str(error)
    return {"answers": answers, "in_use": in_use, "counters": found, "said": said}


def declined(engine: Engine) -> Answer:
    """Prompts that never come back, until none is stored; then some that come back twice."""
    counted = [counters(engine)]
    engine.ask(*range(100, 205))
    counted.append(counters(engine))
    answers = []
    for _ in range(3):
        engine.forget()
        answers.append([engine.ask(seed)[0] for seed in range(4)])
        counted.append(counters(engine))
    return {"answers": answers, "counted": counted}


def kept(engine: Engine) -> Answer:
    """Prompts one by one, twice, for an engine before which another may have kept chunks."""
    seeds = range(6)
    first = [engine.ask(seed)[0] for seed in seeds]
    engine.forget()
    second = [engine.ask(seed)[0] for seed in seeds]
    engine.manager().secondary_tiers[0].drain_jobs()
    return {"first": first, "second": second, "counters": counters(engine)}


def kept_and_reset(engine: Engine) -> Answer:
    """As :func:`kept`, and then a reset, after which weights may be others."""
    answer = kept(engine)
    engine.llm.reset_prefix_cache(reset_connector=True)
    engine.ask(0)
    engine.manager().secondary_tiers[0].drain_jobs()
    return answer


def np_rows(tier: Any) -> Any:
    """The memory of a tier, one row a slot."""
    return np.from_dlpack(tier.memory).reshape(tier.slots, -1)


def counters(engine: Engine) -> dict[str, float]:
    """Our counters and gauges as vLLM's Prometheus registry has them, by name and tier."""
    found = {}
    for metric in engine.llm.get_metrics():
        _, ours, rest = metric.name.partition("cxl_offload_kv_")
        if ours:
            found[f"{rest.removesuffix('_chunks')} {metric.labels['tier']}"] = metric.value
    return found


def facts(model: str, options: list[Answer]) -> Answer:
    """What kept chunks of each of these engines depend on, or why they cannot be kept."""
    from vllm.engine.arg_utils import EngineArgs

    said: list[Any] = []
    for each in options:
        os.environ.pop("PYTHONHASHSEED", None)
        os.environ.update(each.pop("environment", {}))
        try:
            made = EngineArgs(**({"model": model} | each)).create_engine_config()
            extra = made.kv_transfer_config.kv_connector_extra_config
            said.append(extra.get("kept_facts"))
        except Exception as error:
            said.append(str(error))
    return {"facts": said}


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


SCENARIOS: dict[str, Callable[[Engine], Answer]] = {
    "plain": plain,
    "reuse": reuse,
    "tiers": tiers,
    "parallel": parallel,
    "trouble": trouble,
    "declined": declined,
    "kept": kept,
    "kept and reset": kept_and_reset,
}


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    request = json.load(sys.stdin)
    os.environ.update(request.get("environment", {}))
    killed = False
    if request["scenario"] == "refusals":
        answer = refusals(request["model"], request["options"]["each"])
    elif request["scenario"] == "facts":
        answer = facts(request["model"], request["options"]["each"])
    else:
        killed = request["options"].pop("killed", False)
        engine = Engine(request["model"], request["options"])
        answer = SCENARIOS[request["scenario"]](engine)
        if not answer.get("said") and not killed:
            engine.llm.llm_engine.engine_core.shutdown()
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
    if answer.get("said"):
        os._exit(0)  # an engine that failed as it was made to is not asked to end well


if __name__ == "__main__":
    main()
