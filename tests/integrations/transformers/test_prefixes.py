"""Prompts' beginnings are kept, and read again: same tokens, and only the rest is computed."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import (
    KeptPrefixes,
    Offloaded,
    PrefixCounts,
    offload,
    prefix_facts,
)
from cxl_offload.integrations.transformers.prefix_keys import chain
from cxl_offload.kept import KeptReader, blocks, find_kept, kept_path, verify_kept
from cxl_offload.kept.store import read_header
from cxl_offload.memory import Session

from .conftest import machine
from .models import FAMILIES, ONLY_EAGER, PAD, VOCAB, generate, make

CXL = {"kv": "bind:2"}
BLOCK = 4


@pytest.fixture
def name() -> Iterator[str]:
    found = f"test-{uuid4().hex}"
    yield found
    kept_path(found).unlink(missing_ok=True)


def kept(name: str | None = None, nbytes: int | str = "4MiB") -> KeptPrefixes:
    return KeptPrefixes(bytes=nbytes, persist=name, block_tokens=BLOCK)


def texts(*padding: int, length: int = 30, seed: int = 1, own: int = 3) -> dict[str, Any]:
    """A row for each padding: the same text in all of them, with ends of their own."""
    numbers = torch.Generator().manual_seed(seed)
    text = torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(9))
    ids = torch.full((len(padding), length), PAD)
    mask = torch.zeros_like(ids)
    for row, pads in enumerate(padding):
        ids[row, pads:] = text[: length - pads]
        ids[row, length - own :] = torch.randint(3, VOCAB, (own,), generator=numbers)
        mask[row, pads:] = 1
    return {"input_ids": ids, "attention_mask": mask}


def own_of(family: str) -> str:
    return "eager" if family in ONLY_EAGER else "sdpa"


def computed_tokens(model: PreTrainedModel) -> list[int]:
    """Grows by the tokens of every forward pass, from now on."""
    seen: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: seen.append(int(args[0].shape[1]))
    )
    return seen


def counts_of(done: Offloaded) -> PrefixCounts:
    assert done.prefixes is not None
    return done.prefixes


def forget(model: PreTrainedModel) -> None:
    """Other weights, in the same memory."""
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[:8] *= -1


@pytest.mark.parametrize("way", ["greedy", "fixed cache"])
@pytest.mark.parametrize("family", FAMILIES)
def test_second_prompt_computes_only_its_rest_and_gives_the_same_tokens(
    family: str, way: str, session: Session
) -> None:
    """Also behind windows that are shorter than what was found."""
    model = make(family)
    options = {} if way == "greedy" else {"cache_implementation": "static"}
    both = texts(0, 0), texts(0, 0, seed=2)
    expected = [generate(model, own_of(family), **each, **options) for each in both]
    with offload(model, CXL, prefixes=kept(), session=session) as done:
        passes = computed_tokens(model)
        tokens = [generate(model, **each, **options) for each in both]
        counts = counts_of(done)
    assert [torch.equal(*each) for each in zip(tokens, expected, strict=True)] == [True, True]
    assert (counts.found_tokens, counts.prompt_tokens) == (2 * 24, 4 * 30)
    assert not counts.computed
    assert [count for count in passes if count > 1] == [30, 6]


@pytest.mark.parametrize("family", ["opt", "gemma3", "gpt2"])
def test_padding_moves_no_position(family: str, session: Session) -> None:
    """A row finds what another one computed behind more padding, or behind none."""
    model = make(family)
    batches = texts(5), texts(0, 3, 9), texts(2, 0, seed=2), texts(26, 0, seed=3)
    expected = [generate(model, "sdpa", **each) for each in batches]
    found = []
    with offload(model, CXL, prefixes=kept(), session=session) as done:
        for batch, tokens in zip(batches, expected, strict=True):
            before = counts_of(done).found_tokens
            assert torch.equal(generate(model, **batch), tokens)
            found.append(counts_of(done).found_tokens - before)
    # The first prompt leaves five blocks. All rows of a batch share what the row with the least
    # has: 20 tokens of the row that is not padded, and as many columns of the others.
    assert found[:2] == [0, 20 + 17 + 11]
    # 24 tokens of each row are there; behind two columns of padding one needs 26.
    assert found[2] == 24 + 22
    # Of a row of four tokens one has to be computed, so nothing is read.
    assert found[3] == 24


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_return_sequences": 2, "do_sample": True, "temperature": 0.8},
        {"return_dict_in_generate": False, "output_scores": True},
    ],
    ids=["beams", "sampling", "scores"],
)
def test_ways_of_generation_give_the_same_tokens(options: dict[str, Any], session: Session) -> None:
    model = make("gemma3")

    def drawn(**given: Any) -> torch.Tensor:
        torch.manual_seed(7)
        return generate(model, **given, **options)

    both = texts(0, 6), texts(0, 6, seed=2)
    expected = [drawn(**each) for each in both]
    with offload(model, CXL, prefixes=kept(), session=session) as done:
        assert [torch.equal(drawn(**a), b) for a, b in zip(both, expected, strict=True)] == [
            True,
            True,
        ]
        assert counts_of(done).found_tokens > 0


def test_rows_in_parts_give_the_same_tokens(session: Session) -> None:
    model = make("llama")
    both = texts(0, 6, 2), texts(0, 6, 2, seed=2)
    expected = [generate(model, "sdpa", **each) for each in both]
    with offload(model, CXL, prefixes=kept(), rows_at_once=2, session=session) as done:
        assert all(
            torch.equal(generate(model, **a), b) for a, b in zip(both, expected, strict=True)
        )
        assert counts_of(done).found_tokens == 24 + 18 + 22


def test_compiled_layers_give_the_same_tokens(session: Session) -> None:
    model = make("llama")
    few: dict[str, Any] = {"max_new_tokens": 3}
    both = texts(0), texts(0, seed=2)
    expected = [generate(model, "sdpa", **each, **few) for each in both]
    with offload(model, CXL, prefixes=kept(), session=session) as done:
        model.model.layers[0].compile(backend="eager", dynamic=True)
        for batch, tokens in zip(both, expected, strict=True):
            assert torch.equal(generate(model, **batch, **few), tokens)
        assert counts_of(done).found_tokens == 24


def test_prompts_that_no_store_serves_are_computed_and_say_why(session: Session) -> None:
    model, assistant = make("llama"), make("llama")
    text = texts(0)
    holes = {**text, "attention_mask": text["attention_mask"].clone()}
    holes["attention_mask"][0, 10] = 0
    alone = generate(model, "sdpa", **text)
    expected = generate(model, "sdpa", **holes)
    with offload(model, CXL, prefixes=kept(), session=session) as done:
        assert torch.equal(generate(model, **text), alone)
        assert torch.equal(generate(model, **text, assistant_model=assistant), alone)
        assert torch.equal(generate(model, **holes), expected)
        assert torch.equal(generate(model, **text, prefill_chunk_size=7), alone)
        with torch.no_grad():
            cache = model(text["input_ids"][:, :10]).past_key_values
        assert torch.equal(generate(model, **text, past_key_values=cache), alone)
        del cache
        with torch.autocast("cpu", dtype=torch.bfloat16):
            generate(model, **text)
        made: Any = generate(model, **text, output_hidden_states=True, return_dict_in_generate=True)
        assert made.hidden_states[0][0].shape[1] == 30
        del made
        counts = counts_of(done)
    assert counts.found_tokens == 0
    assert sorted(counts.computed) == [
        "a cache that holds something already, or none",
        "attentions or hidden states of the whole prompt are asked for",
        "autocast",
        "prefill_chunk_size",
        "tokens that are hidden inside of a prompt",
    ]


def test_cache_is_given_back_at_once(session: Session) -> None:
    """Without the garbage collector, which would come by later."""
    model = make("llama")
    with offload(model, CXL, prefixes=kept(), session=session):
        gc.collect()
        gc.disable()
        try:
            for found in (0, 28):
                tokens = generate(model, **texts(0, 4))
                assert session.stats().asked_bytes.current == 0, f"{found} tokens were found"
                del tokens
        finally:
            gc.enable()


def test_block_that_begins_in_inference_mode_keeps_what_comes_after_it(session: Session) -> None:
    model = make("llama")
    done = offload(model, CXL, prefixes=kept(), session=session)
    with torch.inference_mode():
        done.__enter__()
        generate(model, **texts(0))
    expected = generate(model, **texts(0))
    assert torch.equal(generate(model, **texts(0, seed=2)), generate(model, **texts(0, seed=2)))
    assert counts_of(done).found_tokens == 28 + 24 + 28
    done.__exit__(None, None, None)
    assert torch.equal(generate(model, "sdpa", **texts(0)), expected)


def test_prompt_that_fails_midway_keeps_nothing_and_costs_no_slot(session: Session) -> None:
    model = make("llama")
    expected = generate(model, "sdpa", **texts(0))
    with offload(model, CXL, prefixes=kept(), session=session) as done:
        hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                generate(model, **texts(0))
        hook.remove()
        blocks = done._reuse.blocks  # type: ignore[union-attr]
        assert len(blocks) == 0
        assert blocks._books.slots_left == blocks._books.store.layout.slots  # type: ignore[union-attr]
        assert torch.equal(generate(model, **texts(0)), expected)
        assert len(blocks) == 7


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
    with kept_path(name).open("r+b") as file:
        header = read_header(file.fileno())
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


def other_dtype(model: PreTrainedModel) -> PreTrainedModel:
    return model.to(torch.bfloat16)


def other_weights(model: PreTrainedModel) -> PreTrainedModel:
    forget(model)
    return model


def other_positions(model: PreTrainedModel) -> PreTrainedModel:
    model.model.rotary_emb.inv_freq *= 0.5
    return model


def other_configuration(model: PreTrainedModel) -> PreTrainedModel:
    model.config.rms_norm_eps *= 2
    return model


def other_attention(model: PreTrainedModel) -> PreTrainedModel:
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize(
    "other", [other_dtype, other_weights, other_positions, other_configuration, other_attention]
)
def test_blocks_of_another_model_are_dropped(
    other: Callable[[PreTrainedModel], PreTrainedModel],
    name: str,
    session: Session,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with offload(make("llama"), CXL, prefixes=kept(name), session=session) as done:
        generate(done.model, **texts(0))
    changed = other(make("llama"))
    expected = generate(changed, **texts(0))
    with offload(changed, CXL, prefixes=kept(name), session=session) as done:
        assert torch.equal(generate(changed, **texts(0)), expected)
        assert counts_of(done).found_tokens == 0
    assert "dropped the kept blocks" in caplog.text


def by_address(model: PreTrainedModel) -> None:
    """As a kernel of an optimizer does: torch counts no version."""
    weight = model.model.layers[0].mlp.down_proj.weight
    before = weight._version
    weight.data.mul_(-1)
    assert weight._version == before


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "protection taken out"])
@pytest.mark.parametrize("change", [forget, by_address])
def test_weights_that_change_in_the_block_hit_nothing(
    change: Callable[[PreTrainedModel], None],
    seen: bool,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And when they change back, the blocks from before are right again."""
    model, changed = make("llama"), make("llama")
    change(changed)
    expected = generate(changed, "sdpa", **texts(0, seed=2))
    if not seen:
        monkeypatch.setattr(prefix_facts, "_looks", lambda model: b"always the same")
    with offload(model, CXL, prefixes=kept(), session=session) as done:
        generate(model, **texts(0))
        change(model)
        assert torch.equal(generate(model, **texts(0, seed=2)), expected) == seen
        assert (counts_of(done).found_tokens == 0) == seen
        change(model)
        generate(model, **texts(0))
        assert counts_of(done).found_tokens == (28 if seen else 24 + 28)


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bytes": "3 apples"}, "bytes '3 apples'"),
        ({"bytes": 0}, "at least a block"),
        ({"bytes": 100}, "a block of 16 tokens takes 8 KiB"),
        ({"bytes": "1MiB", "persist": "a/b"}, "without a slash"),
        ({"bytes": "1MiB", "persist_folder": "/dev/shm"}, "does nothing without persist"),
        ({"bytes": "1MiB", "persist": "a", "persist_folder": "no/folder"}, "no such folder"),
        ({"bytes": "1MiB", "policy": "bind:77"}, "77"),
        ({"bytes": "1MiB", "block_tokens": 0}, "block_tokens 0"),
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
