"""Which chunks are stored, under traffic of several kinds, by vLLM's own managers."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from cxl_offload.kept import kept_path
from tests.integrations.vllm.traffic import (
    CHUNK_TOKENS,
    Prompt,
    Server,
    conversations,
    keys_of,
    make_manager,
    mixed,
    never_again,
    text,
)

pytestmark = pytest.mark.usefixtures("vllm")

HOLDS = 2000
"""Chunks of the largest tier; conversations below take 700."""

Serve = Callable[..., Server]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Servers over tiers that hold :data:`HOLDS` chunks, or as asked."""
    import cxl_offload.integrations.vllm.kv_spec  # noqa: F401  # takes seconds, of no test

    with contextlib.ExitStack() as stack:

        def start(*, cache: int = 128, hot: int = HOLDS, **options: Any) -> Server:
            server = Server(make_manager(hot=hot, **options), cache)
            stack.callback(server.manager.shutdown)
            return server

        yield start


TIERS: dict[str, dict[str, Any]] = {"one tier": {}, "two tiers": {"hot": 200, "cold": HOLDS}}


@pytest.mark.parametrize("tiers", TIERS)
def test_prompts_that_never_come_back_are_soon_not_stored(tiers: str, serve: Serve) -> None:
    prompts = never_again(100, chunks=42, name="once")
    server, stores_all = serve(**TIERS[tiers]), serve(admission="all", **TIERS[tiers])
    server.play(prompts)
    stores_all.play(prompts)
    assert stores_all.stored == 4200
    assert stores_all.declined == 0
    # As many as half the tier, or the least that the mean is taken of.
    assert 800 < server.stored < HOLDS / 2
    assert server.stored + server.declined == 4200
    before = server.stored
    server.play(never_again(100, chunks=42, name="later"))
    assert server.stored == before


@pytest.mark.parametrize("tiers", TIERS)
def test_conversations_are_stored_whole_from_the_first_turn(tiers: str, serve: Serve) -> None:
    prompts = conversations(12, turns=2, chunks=42, name="talk")
    server, stores_all = serve(**TIERS[tiers]), serve(admission="all", **TIERS[tiers])
    assert server.play(prompts) == stores_all.play(prompts)
    # The second turn computes its three chunks and what is new to nobody else.
    assert server.computed == 4 + 12 * 42 + 12 * 3
    assert (server.stored, server.declined) == (stores_all.stored, 0)


def test_conversations_among_prompts_that_never_come_back_lose_nothing(serve: Serve) -> None:
    talk = [
        prompt
        for block in range(10)
        for prompt in conversations(6, turns=3, chunks=20, name=f"talk-{block}")
    ]
    prompts = list(mixed([talk, never_again(120, chunks=20, name="once")], seed=4))
    server, stores_all = serve(), serve(admission="all")
    server.play(prompts)
    stores_all.play(prompts)
    assert server.computed == stores_all.computed
    assert server.declined == 0


def test_load_that_changes_and_changes_back_loses_a_turn_at_most(serve: Serve) -> None:
    server, stores_all = serve(), serve(admission="all")
    for block in range(6):
        prompts = conversations(12, turns=3, chunks=42, name=f"before-{block}")
        assert server.play(prompts) == stores_all.play(prompts)
    assert server.declined == 0
    once = never_again(100, chunks=42, name="once")
    server.play(once)
    stores_all.play(once)
    stored_once = 4200 - server.declined
    assert stored_once < HOLDS / 2
    lost = []
    for block in range(4):
        prompts = conversations(12, turns=3, chunks=42, name=f"after-{block}")
        lost.append(server.play(prompts) - stores_all.play(prompts))
    # Of the first block, some second turns are computed again; then everything is as before.
    assert 0 <= lost[0] <= 12 * 42 + 4
    assert lost[1:] == [0, 0, 0]


def test_beginning_that_requests_share_is_stored_when_it_is_seen_twice(serve: Serve) -> None:
    server = serve(cache=40)
    server.play(never_again(60, chunks=42, name="once"))
    before = server.stored
    shared, computed, stored = text(20, of="instructions"), [], []
    for task in range(60):
        computed.append(server.ask(shared + text(30, of=f"task-{task}")))
        server.ask(text(42, of=f"other-{task}"))  # takes the KV cache
        stored.append(server.stored - before)
    assert computed[:2] == [50, 50]
    assert set(computed[2:]) == {30}
    assert stored[0] == 0
    # That some came back is a reason to try new ones again, for a while.
    assert 20 <= stored[-1] == stored[20] < 20 + 256


def test_shared_beginning_alone_does_not_make_the_rest_worth_storing(serve: Serve) -> None:
    server = serve(cache=10)
    shared = text(20, of="instructions")
    prompts = [shared + text(30, of=f"task-{task}") for task in range(160)]
    computed = [server.ask(prompt) for prompt in prompts]
    assert set(computed[1:]) == {30}
    assert server.stored < 20 + HOLDS / 2
    assert server.declined > 160 * 30 - HOLDS / 2 - 20


def test_what_the_tier_cannot_hold_until_it_is_asked_for_is_not_stored(serve: Serve) -> None:
    prompts = never_again(100, chunks=42, name="round")  # twice what the tier holds
    server, stores_all = serve(), serve(admission="all")
    for _ in range(3):
        # What was stored before the rest was declined stays, and serves a part.
        assert server.play(prompts) <= stores_all.play(prompts) == 4200
    assert stores_all.stored == 3 * 4200
    assert server.stored < HOLDS / 2


def test_chunks_that_stay_away_for_long_are_stored_once_that_is_known(serve: Serve) -> None:
    # 40 people of 42 chunks: their second turn comes after most of what the tier holds, and the
    # first time by far not all of it was stored.
    server, stores_all = serve(), serve(admission="all")
    lost = []
    for block in range(5):
        prompts = conversations(40, turns=3, chunks=42, name=f"slow-{block}")
        lost.append(server.play(prompts) - stores_all.play(prompts))
    assert lost[0] > 0, "else this shows nothing"
    assert lost[0] <= 40 * 42 + 4
    assert lost[1:] == [0, 0, 0, 0]


def test_nothing_behind_a_chunk_that_is_not_stored_is(serve: Serve) -> None:
    server, draw = serve(cache=10, hot=600), random.Random(8)
    asked: list[Prompt] = []
    for number in range(400):
        begin = draw.choice(asked) if asked and draw.random() < 0.1 else []
        prompt = begin[: draw.randrange(40)] + text(draw.randrange(1, 30), of=f"end-{number}")
        server.ask(prompt)
        asked.append(prompt)
    assert server.declined > 100
    holds = server.manager._policy.get
    recent = asked[-20:]
    for prompt in recent:
        there = [holds(key) is not None for key in keys_of(prompt)]
        assert there == sorted(there, reverse=True), "holes are chunks that nobody can find"


def test_all_does_what_vllms_own_manager_does(serve: Serve) -> None:
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    ours = serve(admission="all", hot=300, eviction_policy="arc")
    stock = Server(CPUOffloadingManager(num_chunks=300, cache_policy="arc"), cache=128)
    adaptive = serve(hot=300, eviction_policy="arc")
    said: dict[str, list[Any]] = {"ours": [], "stock": [], "adaptive": []}
    for name, server in (("ours", ours), ("stock", stock), ("adaptive", adaptive)):
        inner = server.manager.prepare_store

        def prepare(keys: Any, context: Any, inner: Any = inner, name: str = name) -> Any:
            found = inner(keys, context)
            ids = found.store_spec.block_ids.tolist()
            said[name].append((found.keys_to_store, ids, found.evicted_keys))
            return found

        server.manager.prepare_store = prepare
    draw = random.Random(2)
    asked: list[Prompt] = [text(5, of="first")]
    for number in range(300):
        begin = draw.choice(asked) if number < 40 and draw.random() < 0.4 else []
        asked.append(begin + text(draw.randrange(1, 20), of=f"end-{number}"))
    computed = [server.play(asked) for server in (ours, stock, adaptive)]
    assert said["ours"] == said["stock"]
    assert computed[0] == computed[1]
    assert said["adaptive"] != said["stock"], "the control"


def test_stores_that_vllm_offers_again_are_judged_and_counted_once() -> None:
    from cxl_offload.integrations.vllm.kv_admission import Admission, RequestPrefix

    admission, request = Admission(HOLDS, CHUNK_TOKENS), RequestPrefix()
    keys = [bytes([number]) * 32 for number in range(8)]
    ends = [CHUNK_TOKENS * number for number in range(1, 9)]
    admission.looked_up(request, CHUNK_TOKENS)
    for _ in range(50):  # no room, says the manager each time
        assert all(admission.admit(request, keys, ends))
    assert admission.share == pytest.approx((1 - 1 / 256) ** 8, rel=0.01)
    again = RequestPrefix()
    admission.looked_up(again, CHUNK_TOKENS)
    admission.admit(again, keys, ends)
    assert admission.share > 0.995, "another request is another matter"


def test_what_the_kv_cache_still_had_counts_for_nothing(serve: Serve) -> None:
    prompts = [
        prompt
        for number in range(60)
        for prompt in [text(42, of=f"twice-{number}"), text(42, of=f"twice-{number}")]
    ]
    server, misses = serve(cache=128), serve(cache=1)
    server.play(prompts)
    misses.play(prompts)
    assert server.loaded == 0
    assert server.declined > 42 * 20
    assert (misses.loaded > 42 * 50, misses.declined) == (True, 0), "the control"


@pytest.mark.parametrize("wide", ["a window", "a state"])
def test_model_whose_chunks_are_no_prefix_has_them_all_stored(
    wide: str, caplog: pytest.LogCaptureFixture
) -> None:
    from cxl_offload.integrations.vllm.kv_admission import Admission, RequestPrefix

    admission = Admission(HOLDS, CHUNK_TOKENS)
    caplog.set_level("INFO", "vllm")
    logging.getLogger("vllm").addHandler(caplog.handler)  # vLLM's do not reach the root
    for number in range(200):
        keys = [bytes([number, at]) * 16 for at in range(30)]
        ends = [CHUNK_TOKENS * (at + 1) for at in range(30)]
        kept = ends[-4:] if wide == "a window" else [end + 5 for end in ends[-4:]]
        assert all(admission.admit(RequestPrefix(), keys[-4:], kept))
    logging.getLogger("vllm").removeHandler(caplog.handler)
    told = {id(each) for each in caplog.records if "all are stored" in each.getMessage()}
    assert len(told) == 1


def test_chunks_of_an_engine_before_count_when_they_are_read() -> None:
    from cxl_offload.integrations.vllm.kv_admission import BEGINS_ABOVE, Admission, RequestPrefix

    admission = Admission(HOLDS, CHUNK_TOKENS)

    def once(number: int) -> list[bool]:
        keys = [number.to_bytes(4, "big") + bytes([at]) for at in range(40)]
        return admission.admit(RequestPrefix(), keys, range(16, 41 * 16, 16))

    for number in range(30):
        once(number)
    assert not any(once(30))
    keys = [b"kept" + bytes([at]) for at in range(40)]
    for _ in range(2):
        admission.loaded(RequestPrefix(), keys, range(16, 41 * 16, 16))
    assert admission.share > BEGINS_ABOVE
    assert all(once(31))


@pytest.mark.parametrize("rule", ["default", "adaptive"])
def test_chunks_that_outlive_the_engine_are_found_by_the_next_one(
    rule: str, serve: Serve, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    facts = dict.fromkeys(("dtype", "hash", "hash seed", "revision"), "None")
    name = f"test-{uuid4().hex}"
    options = {"kept_facts": facts | {"model": str(tmp_path), "download_dir": ""}}
    if rule == "adaptive":
        options["admission"] = rule
    once = never_again(40, chunks=42, name="once")
    talk = conversations(6, turns=3, chunks=20, name="talk")
    try:
        first = Server(make_manager(hot=200, cold=HOLDS, persist=name, **options), 128)
        first.play(talk + once)
        first.manager.shutdown()
        after = serve(hot=200, cold=HOLDS, persist=name, **options)
        assert after.play(talk[-6:]) == 0
        assert after.play(once) == first.declined
    finally:
        kept_path(name).unlink(missing_ok=True)
    # That the next engine asks again is not seen: by default all is stored.
    assert (first.declined > 500) == (rule == "adaptive")


def test_request_whose_beginning_was_declined_is_declined_to_its_end() -> None:
    from cxl_offload.integrations.vllm.kv_admission import Admission, RequestPrefix

    admission = Admission(HOLDS, CHUNK_TOKENS)
    ends = range(16, 41 * 16, 16)

    def keys(number: int) -> list[bytes]:
        return [number.to_bytes(4, "big") + bytes([at]) for at in range(40)]

    for number in range(30):
        admission.admit(RequestPrefix(), keys(number), ends)
    request = RequestPrefix()
    assert not any(admission.admit(request, keys(30)[:20], ends[:20]))
    for number in (27, 28, 29):  # they come back, so that new ones are stored again
        other = RequestPrefix(looked_up_from=16)
        assert all(admission.admit(other, keys(number), ends))
    assert all(admission.admit(RequestPrefix(), keys(31), ends))
    assert not any(admission.admit(request, keys(30)[20:], ends[20:]))


def test_request_that_a_tier_wants_whole_is_stored_whole() -> None:
    from cxl_offload.integrations.vllm.kv_admission import Admission, RequestPrefix

    admission = Admission(HOLDS, CHUNK_TOKENS)
    ends = range(16, 41 * 16, 16)
    answers = []
    for number in range(60):
        keys = [number.to_bytes(4, "big") + bytes([at]) for at in range(40)]
        answers.append(all(admission.admit(RequestPrefix(is_whole=number % 2 == 1), keys, ends)))
    assert all(answers[1::2])
    assert not answers[-2], "the control"
