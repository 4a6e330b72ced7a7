"""Conversations that take turns: the cache in use near, the others far, tokens as ever."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import offload
from cxl_offload.memory import Session
from cxl_offload.topology import load_machine
from cxl_offload.tune import decisions

from .models import VOCAB, make

FAR = {"kv": "bind:cxl"}


@pytest.fixture
def published() -> Iterator[Session]:
    session = Session.simulated(load_machine("epyc9354-cxl-a"))
    yield session
    assert session.stats().asked_bytes.current == 0


class Chat:
    """One conversation: a cache, and the tokens so far."""

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)
        draw = torch.Generator().manual_seed(seed)
        self.said = torch.randint(3, VOCAB, (1, 200), generator=draw)

    def turn(self, tokens: int = 24) -> torch.Tensor:
        self.said = self.model.generate(
            self.said,
            attention_mask=torch.ones_like(self.said),
            past_key_values=self.cache,
            max_new_tokens=tokens,
            do_sample=False,
        )
        return self.said


def cache_bytes(session: Session, chat: Chat) -> int:
    before = session.stats().asked_bytes.current
    chat.turn()
    return session.stats().asked_bytes.current - before


def test_cache_in_use_is_near_and_those_that_wait_are_far(published: Session) -> None:
    model = make("llama")
    stock = [Chat(model, seed) for seed in range(3)]
    right = [one.turn() for _ in range(3) for one in stock]
    with offload(
        model, FAR, session=published, near_kv_bytes=2 << 20, tune_budget_bytes=1 << 30
    ) as done:
        chats = [Chat(model, seed) for seed in range(3)]
        size = cache_bytes(published, chats[0])
        caches = done.tuned.caches
        caches.uses._room = int(1.5 * size)  # for one of them
        said = [chats[0].said]
        for number in range(1, 9):
            chat = chats[number % 3]
            said.append(chat.turn())
            assert caches.granted() == (chat.cache,)
            near = published.stats().nodes[0].current_bytes
            assert near <= caches.uses._room
        for ours, expected in zip(said, right, strict=True):
            assert torch.equal(ours, expected)
        caches.expect([chats[0].cache, chats[1].cache])
        caches.uses._room = 1 << 30
        chats[2].turn(4)
        assert set(caches.granted()) == {chats[2].cache, chats[0].cache}  # before its turn
        moved = caches.uses.moved_bytes
        del chats, chat, caches
    counted = [one for one in decisions() if one.tuner == "next-use" and one.outcome == "moved"]
    assert sum(one.nbytes for one in counted) >= moved


def test_caches_stay_and_are_advised_about_without_a_budget(
    published: Session, caplog: pytest.LogCaptureFixture
) -> None:
    model = make("llama")
    with (
        caplog.at_level("INFO", "cxl_offload.tune"),
        offload(model, FAR, session=published, near_kv_bytes=1 << 30) as done,
    ):
        chat = Chat(model, 0)
        chat.turn()
        assert done.tuned.caches.granted() == ()
        assert done.tuned.caches.uses.moved_bytes == 0
        del chat
    assert "tune, advice only: sequence 0 is in use and far" in caplog.text


def test_short_turns_do_not_move_a_cache(published: Session) -> None:
    model = make("llama")
    with offload(
        model, FAR, session=published, near_kv_bytes=1 << 30, tune_budget_bytes=1 << 30
    ) as done:
        caches = done.tuned.caches
        caches.uses._turn_steps = 2.0  # as after many turns of two steps
        chat = Chat(model, 0)
        chat.turn(2)
        assert caches.uses.moved_bytes == 0
        del chat, caches


def test_full_node_ends_the_moves_and_nothing_else(
    published: Session, caplog: pytest.LogCaptureFixture
) -> None:
    model = make("llama")
    published.kernel.set_used_by_others(0, published.free_bytes(0))
    right = Chat(model, 0).turn()
    with offload(
        model, FAR, session=published, near_kv_bytes=1 << 30, tune_budget_bytes=1 << 30
    ) as done:
        chat = Chat(model, 0)
        assert torch.equal(chat.turn(), right)
        assert done.tuned.caches.granted() == ()
        del chat
    assert "stay where they are" in caplog.text


def test_options_that_do_not_fit_are_refused_in_one_line(published: Session) -> None:
    with (
        pytest.warns(DeprecationWarning, match="hot_kv_bytes= is now near_kv_bytes="),
        pytest.raises(ConfigError, match="near_kv_bytes needs the cache in tiers"),
    ):
        offload(make("llama"), {"mlp": "bind:cxl"}, session=published, hot_kv_bytes=1)
    with pytest.raises(ConfigError, match="near_kv_bytes needs the cache in tiers"):
        offload(make("llama"), {"mlp": "bind:cxl"}, session=published, near_kv_bytes=1)
    with pytest.raises(ConfigError, match="near_kv_bytes is -1; it must be at least 0"):
        offload(make("llama"), FAR, session=published, near_kv_bytes=-1)
