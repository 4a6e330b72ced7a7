"""Traffic for the scheduler's side of KV offloading: requests as vLLM plays them, without a model.

What vLLM's scheduler does with a request is done here in its order: what the KV cache has, lookups
of what it lacks, a load, stores step by step as the prompt is computed. A prompt is a list of
texts, one for each chunk; it is the beginning that counts, as in vLLM's hashes.
"""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

CHUNK_TOKENS = 16
Prompt = list[str]


def make_manager(
    *, hot: int, cold: int | None = None, persist: str | None = None, **extra: Any
) -> Any:
    """The manager of an engine of one rank, by way of the spec.

    Parameters
    ----------
    hot, cold
        Chunks that the tiers hold.
    persist
        Name of the file in which the cold one's outlive it.
    """
    from cxl_offload.integrations.vllm.kv_spec import CxlOffloadingSpec
    from tests.integrations.vllm.test_kv_books import ROW
    from tests.integrations.vllm.test_kv_kept import offloading_config

    options: dict[str, Any] = {"cpu_bytes_to_use": hot * ROW, "policy": "bind:0"} | extra
    if cold is not None:
        options["cold"] = {"bytes": cold * ROW, "policy": "bind:0"}
        if persist is not None:
            options["cold"]["persist"] = persist
    config = replace(
        offloading_config(), extra_config=options, engine_id=f"traffic-{uuid4().hex[:8]}"
    )
    return CxlOffloadingSpec(config).get_manager()


@dataclass
class Server:
    """A manager under requests that come one after another.

    Attributes
    ----------
    cache
        Chunks that the KV cache holds.
    step
        Chunks that are computed in one step.
    computed, stored, loaded
        Chunks so far.
    """

    manager: Any
    cache: int
    step: int = 16
    computed: int = 0
    stored: int = 0
    loaded: int = 0
    _cached: OrderedDict[Any, None] = field(default_factory=OrderedDict)
    _requests: int = 0

    def ask(self, prompt: Sequence[str]) -> int:
        """Serves a prompt; chunks that had to be computed for it."""
        from vllm.v1.kv_offload.base import ReqContext

        self._requests += 1
        context = ReqContext(f"request-{self._requests}")
        self.manager.on_new_request(context)
        keys = keys_of(prompt)
        for number, key in enumerate(keys, 1):
            context.set_offload_key_position(key, number * CHUNK_TOKENS)
        here = 0
        while here < len(keys) and keys[here] in self._cached:
            here += 1
        there = self._load(keys[here:], context)
        computed = len(keys) - here - there
        done = here + there if there else 0  # vLLM offers what its cache had unless it loads
        while done < len(keys):
            end = min(len(keys), max(done, here) + self.step)
            self._store(keys[done:end], context)
            done = end
        self._end_step(context)
        self.manager.on_request_finished(context)
        for key in keys[::-1]:  # the end of a prompt goes first
            self._cached[key] = None
            self._cached.move_to_end(key)
        while len(self._cached) > self.cache:
            self._cached.popitem(last=False)
        self.computed += computed
        return computed

    def play(self, prompts: Sequence[Sequence[str]]) -> int:
        return sum(self.ask(prompt) for prompt in prompts)

    @property
    def declined(self) -> int:
        manager = self.manager
        first = getattr(manager, "primary_tier", manager)
        return int(first.tier_counts.totals["declined"])

    def _load(self, keys: list[Any], context: Any) -> int:
        from vllm.v1.kv_offload.base import LookupResult

        while True:
            hits, waits = 0, False
            for key in keys:
                found = self.manager.lookup(key, context)
                waits |= found in (LookupResult.HIT_PENDING, LookupResult.RETRY)
                if found is LookupResult.MISS:
                    break
                hits += found is not LookupResult.RETRY
            if not waits:
                break
            self._end_step(context)
        if hits:
            self.manager.prepare_load(keys[:hits], context)
            self.manager.complete_load(keys[:hits], context)
            self.loaded += hits
        return hits

    def _store(self, keys: list[Any], context: Any) -> None:
        found = self.manager.prepare_store(keys, context)
        assert found is not None, "the tiers have room"
        if found.keys_to_store:
            self.manager.complete_store(set(found.keys_to_store), context)
        self.stored += len(found.keys_to_store)

    def _end_step(self, context: Any) -> None:
        """Until copies between tiers are done."""
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self.manager.on_schedule_end(ScheduleEndContext([context.req_id], ()))
        for tier in getattr(self.manager, "secondary_tiers", ()):
            tier.drain_jobs()
        self.manager.on_schedule_end(ScheduleEndContext([], ()))


def keys_of(prompt: Sequence[str]) -> list[Any]:
    """vLLM's keys of the chunks; each depends on all chunks before it."""
    from vllm.v1.kv_offload.base import make_offload_key

    before, keys = b"", []
    for text in prompt:
        before = hashlib.sha256(before + text.encode()).digest()
        keys.append(make_offload_key(before, 0))
    return keys


def text(chunks: int, *, of: str) -> Prompt:
    """Some chunks of a text that is like no other of another name."""
    return [f"{of}-{number}" for number in range(chunks)]


def never_again(prompts: int, *, chunks: int, name: str) -> list[Prompt]:
    """Prompts that have nothing in common."""
    return [text(chunks, of=f"{name}-{number}") for number in range(prompts)]


def conversations(people: int, *, turns: int, chunks: int, name: str) -> list[Prompt]:
    """All have their first turn over a shared beginning, then all their second, and so on."""
    shared = text(4, of=f"{name}-shared")
    return [
        shared + text(chunks + 3 * turn, of=f"{name}-{person}")
        for turn in range(turns)
        for person in range(people)
    ]


def mixed(traffic: Sequence[list[Prompt]], *, seed: int) -> Iterator[Prompt]:
    """Several kinds of traffic at once, each in its order."""
    draw, left = random.Random(seed), [list(each[::-1]) for each in traffic]
    while any(left):
        (one,) = draw.choices(left, weights=[len(each) for each in left])
        yield one.pop()
