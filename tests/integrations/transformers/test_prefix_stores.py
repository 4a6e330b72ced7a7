"""Stores of prompts' beginnings: what is kept, shared, killed, damaged, refused."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import (
    KeptPrefixes,
    offload,
)
from cxl_offload.integrations.transformers.prefix_keys import chain
from cxl_offload.kept import KeptReader, blocks, find_kept, kept_path, verify_kept
from cxl_offload.kept.place import place_of
from cxl_offload.memory import Session
from tests.kept.devices import stand_in

from .conftest import machine
from .models import generate, make
from .prefix_prompts import BLOCK, CXL, counts_of, kept, texts


def test_full_store_gives_up_what_was_not_used_for_longest(session: Session) -> None:
    """The end of a text goes before its beginning, without which nothing is found."""
    model = make("llama")
    block_bytes = 2 * 2 * 2 * BLOCK * 16 * 4
    with offload(model, CXL, prefixes=kept(nbytes=10 * block_bytes), session=session) as done:

        def found(**text: Any) -> int:
            before = counts_of(done).found_tokens
            generate(model, **text, max_new_tokens=1)
            return counts_of(done).found_tokens - before

        other = {**texts(0), "input_ids": texts(0)["input_ids"].flip(1)}
        assert [found(**texts(0)), found(**other)] == [0, 0]
        assert found(**texts(0)) == 3 * BLOCK, "seven of ten blocks are the other's"
        longer = texts(0, length=60)
        assert found(**longer) == 6 * BLOCK
        assert len(done._reuse.blocks) == 10  # type: ignore[union-attr]


def test_store_without_a_name_ends_with_the_block(session: Session) -> None:
    model, before = make("llama"), {each.path for each in find_kept()}
    for _ in range(2):
        with offload(model, CXL, prefixes=kept(), session=session) as done:
            generate(model, **texts(0))
            assert counts_of(done).found_tokens == 0
            assert {each.path for each in find_kept()} == before


def test_store_with_a_name_serves_the_next_block(name: str, session: Session) -> None:
    model = make("mistral")
    expected = generate(model, "sdpa", **texts(0, 4))
    for found in (0, 28 + 24):
        with offload(model, CXL, prefixes=kept(name), session=session) as done:
            assert torch.equal(generate(model, **texts(0, 4)), expected)
            assert counts_of(done).found_tokens == found
    (file,) = (each for each in find_kept() if each.name == name)
    assert (file.blocks, file.facts["class"]) == (8, "MistralForCausalLM")
    assert verify_kept(file.path).right == 8


def live_and_die(model: PreTrainedModel, name: str, session: Session, seed: int) -> None:
    """Generates in a forked process that is killed in a layer of one of its passes."""
    left = random.Random(f"death {seed}").randrange(30)

    def count_down(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            for layer in model.model.layers:
                layer.register_forward_hook(count_down)
            with offload(model, CXL, prefixes=kept(name), session=Session.simulated(machine())):
                for number in range(8):
                    generate(model, **texts(0, seed=seed + number), max_new_tokens=2)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


@pytest.mark.slow(reason="many processes are killed")
def test_killed_process_leaves_right_blocks(name: str, session: Session) -> None:
    model = make("gemma3")
    expected = generate(model, "sdpa", **texts(0))
    found = 0
    for seed in range(12):
        live_and_die(model, name, session, seed)
        assert not verify_kept(kept_path(name)).damaged
        with offload(model, CXL, prefixes=kept(name), session=session) as done:
            assert torch.equal(generate(model, **texts(0)), expected), f"seed {seed}"
            found += counts_of(done).found_tokens
    assert found >= 11 * 24


def damage(name: str) -> None:
    """The first block of the text, in all of its numbers."""
    place = place_of(kept_path(name))
    with kept_path(name).open("r+b") as file, place.reading(file.fileno()) as (read, nbytes):
        header = place.header(read, nbytes)
        at = header.layout.block_at(verify_slot(name))
        file.seek(at)
        raw = bytearray(file.read(header.layout.block_bytes))
        numbers = memoryview(raw).cast("f")
        for number, value in enumerate(numbers):
            numbers[number] = -value
        numbers.release()
        file.seek(at)
        file.write(raw)


def verify_slot(name: str) -> int:
    """Of the block that was written first."""
    store = KeptReader(kept_path(name), None)
    found = [entry for key in store.keys if (entry := store.find(key)) is not None]
    store.close()
    return min(found, key=lambda entry: entry.sequence).slot


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "protection taken out"])
def test_damaged_block_is_dropped_and_computed_again(
    checked: bool,
    name: str,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make("llama")
    expected = generate(model, "sdpa", **texts(0))
    with offload(model, CXL, prefixes=kept(name), session=session):
        generate(model, **texts(0))
    damage(name)
    if not checked:
        monkeypatch.setattr(blocks, "is_right", lambda data, expected: True)
    with offload(model, CXL, prefixes=kept(name), session=session) as done:
        assert torch.equal(generate(model, **texts(0)), expected) == checked
        if checked:
            assert counts_of(done).damaged_blocks == 1
            assert counts_of(done).found_tokens == 0
            assert "damaged and was dropped" in caplog.text
            assert torch.equal(generate(model, **texts(0)), expected)
            assert counts_of(done).found_tokens == 28


def test_pages_of_a_store_are_where_the_cache_is(name: str) -> None:
    """On the nodes of this machine."""
    session, model = Session.linux(), make("llama")
    node = session.kernel.local_node
    with offload(model, {"kv": f"bind:{node}"}, prefixes=kept(name), session=session) as done:
        generate(model, **texts(0))
        reuse = done._reuse
        assert reuse is not None
        data = reuse.blocks._all
        assert data is not None
        found = session.placement(data.data_ptr(), data.nbytes)
        assert found.granted == {node: data.nbytes}
        del data
    assert session.stats().asked_bytes.current == 0


def test_second_writer_reads_what_the_first_keeps(name: str, session: Session) -> None:
    model, again = make("qwen3"), make("qwen3")
    expected = generate(model, "sdpa", **texts(0))
    with (
        offload(model, CXL, prefixes=kept(name), session=session) as first,
        offload(again, CXL, prefixes=kept(name), session=session) as second,
    ):
        assert torch.equal(generate(again, **texts(0)), expected)
        assert counts_of(second).kept_blocks == 0
        assert torch.equal(generate(model, **texts(0)), expected)
        assert counts_of(first).kept_blocks == 7
        assert torch.equal(generate(again, **texts(0)), expected)
        assert counts_of(second).found_tokens == 28
        other = make("llama")
        with (
            pytest.raises(ConfigError, match=r"written by another process \(.*class"),
            offload(other, CXL, prefixes=kept(name), session=session),
        ):
            pass
    assert other.generation_config is not None


def test_prefixes_on_a_device_are_there_for_the_next_process(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(stand_in(monkeypatch, tmp_path))
    model = make("llama")
    expected = generate(model, **texts(0))
    with offload(model, CXL, prefixes=kept(path), session=session) as first:
        assert torch.equal(generate(model, **texts(0)), expected)
        assert counts_of(first).kept_blocks == 7
    with offload(model, CXL, prefixes=kept(path), session=session) as second:
        assert torch.equal(generate(model, **texts(0)), expected)
        assert counts_of(second).found_tokens == 28
    with (
        pytest.raises(ConfigError, match=r"prefixes: bytes: keep .* in /dev/dax0.0"),
        offload(model, CXL, prefixes=kept(path, "64MiB"), session=session),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bytes": "3 apples"}, "bytes '3 apples'"),
        ({"bytes": 0}, "at least a block"),
        ({"bytes": -1}, "bytes -1"),
        ({"bytes": 1.5}, "a whole number of bytes"),
        ({"bytes": 10**30}, "addresses of 64 bits"),
        ({"bytes": 1 << 62}, "no file is as large"),
        ({"bytes": 1 << 60}, "prefixes: bytes: keep"),
        ({"bytes": float("nan")}, "bytes nan"),
        ({"bytes": True}, "bytes True"),
        ({"bytes": None}, "bytes None"),
        ({"bytes": b"1MiB"}, "bytes b'1MiB'"),
        ({"bytes": 100}, "a block of 16 tokens takes 8 KiB"),
        ({"bytes": "1MiB", "persist": "a/b"}, "without a slash"),
        ({"bytes": "1MiB", "persist": "/dev/dax99.0"}, "no such Device-DAX device"),
        ({"bytes": "1MiB", "persist": "/dev/dax99.0", "policy": "bind:2"}, "leave it out"),
        ({"bytes": "1MiB", "persist": "/dev/dax99.0", "persist_folder": "/dev"}, "in no folder"),
        ({"bytes": "1MiB", "persist_folder": "/dev/shm"}, "does nothing without persist"),
        ({"bytes": "1MiB", "persist": "a", "persist_folder": "no/folder"}, "no such folder"),
        ({"bytes": "1MiB", "persist": "a", "persist_folder": ""}, "persist_folder '': an empty"),
        ({"bytes": "1MiB", "persist": "a", "persist_folder": 5}, "persist_folder '5': the path"),
        ({"bytes": "1MiB", "persist": "a", "persist_folder": b"/dev/shm"}, "not bytes"),
        ({"bytes": "1MiB", "persist": "a", "persist_folder": "/" + "a" * 5000}, "too long"),
        ({"bytes": "1MiB", "persist": "a", "persist_folder": "~nobody-here/x"}, "persist_folder"),
        ({"bytes": "1MiB", "policy": "bind:77"}, "77"),
        ({"bytes": "1MiB", "block_tokens": 0}, "block_tokens 0"),
        ({"bytes": "1MiB", "block_tokens": 1.5}, "block_tokens 1.5"),
        ({"bytes": "1MiB", "block_tokens": "16"}, "block_tokens '16'"),
        ({"bytes": "1MiB", "block_tokens": None}, "block_tokens None"),
        ({"bytes": "1MiB", "block_tokens": True}, "block_tokens True"),
        ({"bytes": "1MiB", "pages": "2MiB"}, "base or thp"),
    ],
)
def test_bad_option_is_one_line(options: dict[str, Any], said: str, session: Session) -> None:
    with pytest.raises(ConfigError) as error:  # noqa: SIM117
        with offload(make("llama"), CXL, prefixes=KeptPrefixes(**options), session=session):
            pass
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_what_cannot_be_known_again_is_refused(session: Session) -> None:
    long = make("llama")
    long.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    adapted = get_peft_model(make("llama"), LoraConfig(r=2)).get_base_model()
    cases: list[tuple[PreTrainedModel, dict[str, str], dict[str, Any], str]] = [
        (long, CXL, {}, "depend on the length"),
        (adapted, CXL, {}, "has an adapter"),
        (make("llama"), {"weights": "bind:1"}, {}, "policy of kv"),
        (make("llama"), CXL, {"kv_dtype": "int4"}, "do not go with kv_dtype"),
    ]
    for model, policies, options, said in cases:
        with pytest.raises(ConfigError, match=said):
            offload(model, policies, prefixes=kept(), session=session, **options)


def test_keys_stand_for_all_tokens_before(session: Session) -> None:
    numbers = random.Random(5)
    seen: dict[bytes, tuple[int, ...]] = {}
    for _ in range(300):
        text = [numbers.randrange(3) for _ in range(numbers.randrange(1, 14))]
        for block, key in enumerate(chain(b"root", text, 2), start=1):
            assert seen.setdefault(key, tuple(text[: 2 * block])) == tuple(text[: 2 * block])
    assert len(set(seen.values())) == len(seen) > 500
    assert chain(b"root", [1, 2], 2) != chain(b"other", [1, 2], 2)
