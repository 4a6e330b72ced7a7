"""The ``with`` block: what it refuses, what it leaves, and what happens when it fails."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    pipeline,
)

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import load, offload
from cxl_offload.memory import Session

from .conftest import machine
from .models import generate, make, prompts

CXL = {"kv": "cxl"}


def test_model_is_as_before_when_the_block_ends(session: Session) -> None:
    model = make("llama")
    model.set_attn_implementation("sdpa")
    before = _state_of(model)
    with offload(model, CXL, session=session):
        assert _state_of(model) != before
    assert _state_of(model) == before


def test_model_is_as_before_when_the_block_fails(session: Session) -> None:
    model = make("gemma2")
    model.set_attn_implementation("sdpa")
    before = _state_of(model)
    with pytest.raises(KeyError), offload(model, CXL, session=session):
        raise KeyError
    assert _state_of(model) == before


def _state_of(model: PreTrainedModel) -> tuple[Any, ...]:
    return model.config._attn_implementation, sorted(vars(model)), len(model._forward_pre_hooks)


class _FailsAtToken(LogitsProcessor):  # type: ignore[misc]
    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("stop here")
        return scores


def test_failure_midway_gives_the_memory_back(session: Session) -> None:
    """While the exception is still in hand, whose frames hold the cache."""
    model = make("llama")
    failing = LogitsProcessorList([_FailsAtToken(4)])
    with (
        pytest.raises(RuntimeError, match="stop here") as caught,
        offload(model, CXL, session=session),
    ):
        generate(model, logits_processor=failing)
    assert session.stats().nodes[2].peak_bytes > 0
    assert session.stats().asked_bytes.current == 0
    assert caught.value.__traceback__ is not None


def test_full_tier_is_said_in_one_line(session: Session) -> None:
    small = Session.simulated(machine(cxl_bytes=1 << 20))
    model = make("llama")
    with (
        pytest.raises(MemoryError, match="node 2") as caught,
        offload(model, {"kv": "bind:2"}, session=small),
    ):
        generate(model, **prompts(rows=64, length=100))
    assert "\n" not in str(caught.value)
    assert small.stats().asked_bytes.current == 0


def test_blocks_follow_one_another_and_do_not_nest(session: Session) -> None:
    model = make("llama")
    for _ in range(2):
        with offload(model, CXL, session=session) as done:
            generate(model)
            assert done.calls.kernel > 0
            with pytest.raises(ConfigError, match="offloaded already"):
                offload(model, CXL, session=session).__enter__()
    generate(model)
    assert session.stats().asked_bytes.current == 0


def test_copy_of_the_model_does_not_generate_with_the_first_ones_weights(session: Session) -> None:
    model = make("llama")
    with offload(model, CXL, session=session):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.model.layers[0].mlp.down_proj.weight *= -1
        twin_tokens = generate(twin)
    assert torch.equal(twin_tokens, generate(twin, "sdpa"))


def test_room_is_what_generate_will_need(session: Session) -> None:
    model = make("llama")
    with offload(model, CXL, session=session):
        generate(model)
    config = model.config
    position = config.num_key_value_heads * config.hidden_size // config.num_attention_heads * 4
    layers = config.num_hidden_layers
    assert session.stats().asked_bytes.peak == 4 * (20 + 10 - 1) * position * 2 * layers


def test_pipeline_generates_by_the_block(session: Session) -> None:
    model = make("llama")
    stock = generate(model, "sdpa")
    with offload(model, CXL, session=session) as done:
        writes = pipeline("text-generation", model=model, tokenizer=_Numbers())
        ids = " ".join(map(str, prompts()["input_ids"][2].tolist()))
        made = writes(ids, max_new_tokens=10, do_sample=False, repetition_penalty=1.5)
        assert done.calls.kernel > 0
    assert made[0]["generated_text"].split() == [str(token) for token in stock[2].tolist()]


def test_training_step_takes_no_cache(session: Session) -> None:
    model = make("llama").train()
    ids = prompts()["input_ids"]
    with offload(model, CXL, session=session):
        model(ids, labels=ids).loss.backward()
    assert model.lm_head.weight.grad is not None
    assert session.stats().asked_bytes.peak == 0


def test_weights_of_attention_are_those_of_stock(session: Session) -> None:
    model = make("llama")
    model.set_attn_implementation("eager")
    options = {"output_attentions": True, "return_dict_in_generate": True}
    stock = generate(model, **options).attentions
    with offload(model, CXL, session=session) as done:
        ours = generate(model, **options).attentions
    assert done.calls.own.keys() == {"option output_attentions"}
    for steps in zip(ours, stock, strict=True):
        for one, two in zip(*steps, strict=True):
            torch.testing.assert_close(one, two)


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ({"kvs": "cxl"}, "kind 'kvs': kinds are kv, activations, weights, norm"),
        ({"kv": "nvram"}, "'nvram' is neither a node id nor a tier"),
        ({"kv": "bind:9"}, "node 9"),
        ({}, "no policy"),
    ],
)
def test_wrong_policy_is_refused_in_one_line(
    policies: dict[str, str], message: str, session: Session
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        offload(make("llama"), policies, session=session)
    assert "\n" not in str(caught.value)


def test_type_that_states_cannot_have_is_refused(session: Session) -> None:
    with pytest.raises(ConfigError, match=r"kv_dtype torch\.int8"):
        offload(make("llama"), CXL, kv_dtype=torch.int8, session=session)


_TINY = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (lambda: BloomForCausalLM(BloomConfig(n_layer=1, n_head=4, **_TINY)), "AttentionInterface"),
        (lambda: MambaForCausalLM(MambaConfig(num_hidden_layers=1, vocab_size=64)), "."),
        (
            lambda: T5ForConditionalGeneration(T5Config(num_layers=1, d_model=32, vocab_size=64)),
            "encoder",
        ),
        (lambda: make("llama").model, "does not generate"),
        (lambda: torch.nn.Linear(2, 2), "no model of transformers"),
    ],
)
def test_model_against_the_conventions_is_refused_with_the_reason(
    make_model: Any, message: str, session: Session
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        offload(make_model(), CXL, session=session)
    assert "\n" not in str(caught.value)


def test_cache_that_transformers_quantizes_is_refused(session: Session) -> None:
    model = make("llama")
    with offload(model, CXL, session=session), pytest.raises((ConfigError, ImportError)):
        generate(model, cache_implementation="offloaded")


class _Numbers:
    """A tokenizer whose text is the token ids."""

    pad_token_id = eos_token_id = 1
    chat_template = None
    padding_side = "left"

    def __call__(self, text: str, **_: Any) -> Any:
        from transformers import BatchEncoding

        ids = torch.tensor([[int(word) for word in text.split()]])
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(f" {int(token)}" for token in ids)


@pytest.mark.parametrize(
    ("policies", "options", "why"),
    [
        ({5: "cxl"}, {}, "kind 5: kinds are kv"),
        (None, {}, "policies None: give a plan, its file, or one for each kind"),
        ({"weights": "cxl"}, {"kv_dtype": "int4"}, "kv_dtype int4: the model's own cache is used"),
        ({"mlp": "gpu"}, {}, "policy of mlp: gpu: no accelerator computes"),
        (CXL, {"prefixes": 5}, "prefixes 5: give KeptPrefixes"),
        (CXL, {"few_queries": "a"}, "few_queries 'a': a whole number"),
        (CXL, {"session": 5}, "session 5: give a cxl_offload.Session"),
        (CXL, {"rows_at_once": 1.5}, "rows_at_once 1.5: a whole number"),
        (CXL, {"rows_at_once": True}, "rows_at_once True: a whole number"),
        (CXL, {"near_kv_bytes": "1GiB"}, "near_kv_bytes"),
        (CXL, {"linear_rows": 1.5}, "linear_rows 1.5: 0 or more"),
        (CXL, {"linear_rows": True}, "linear_rows True: 0 or more"),
        (
            {"weights": "replicate:0,1"},
            {"linear_rows": 0},
            "policy of weights: replicate:0,1 and linear_rows 0",
        ),
        (
            {"weights": "replicate:0,1", "norm": "cxl"},
            {"linear_rows": 0},
            "policy of experts: replicate:0,1 and linear_rows 0",
        ),
    ],
)
def test_what_makes_no_sense_is_named_as_it_was_given(
    policies: Any, options: dict[str, Any], why: str, session: Session
) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)) as refused:
        offload(make("llama"), policies, **{"session": session, **options})
    assert "\n" not in str(refused.value)


def test_a_model_without_numbers_is_refused(session: Session) -> None:
    with torch.device("meta"):
        model = make("llama")
    with pytest.raises(ConfigError, match="LlamaForCausalLM are on meta"):
        offload(model, {"weights": "cxl"}, session=session).__enter__()


@pytest.mark.parametrize("fails", [False, True])
def test_child_forked_in_the_block_leaves_it_and_does_not_hang(
    fails: bool, session: Session
) -> None:
    model = make("llama")
    model.other = torch.nn.Linear(512, 512)  # more than torch copies without its threads
    weight = model.other.weight
    expected = weight.detach().clone()
    child, threads = 0, torch.get_num_threads()
    torch.set_num_threads(2)
    with contextlib.suppress(KeyError), offload(model, {"weights": "cxl"}, session=session):
        weight.detach() + 1  # they are there
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            if fails:
                raise KeyError
    if child == 0:
        os._exit(0 if weight.numpy(force=True).tobytes() == expected.numpy().tobytes() else 1)
    torch.set_num_threads(threads)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(weight, expected)


def test_block_under_inference_mode_leaves_weights_that_can_be_trained(session: Session) -> None:
    model = make("llama")
    stock = generate(model, "sdpa")
    with torch.inference_mode(), offload(model, {**CXL, "weights": "cxl"}, session=session):
        assert torch.equal(generate(model), stock)
    ids = prompts()["input_ids"]
    model(ids, labels=ids).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_a_model_is_pickled_outside_of_the_block_only(session: Session) -> None:
    model = make("llama")
    with offload(model, {**CXL, "weights": "cxl"}, session=session):
        with pytest.raises(ConfigError, match="cannot be pickled in its offload"):
            pickle.dumps(model)
        assert torch.equal(generate(copy.deepcopy(model)), generate(model))
    assert torch.equal(generate(pickle.loads(pickle.dumps(model))), generate(model))


def test_a_cache_in_tiers_is_copied_and_not_pickled(session: Session) -> None:
    model, asked = make("llama"), prompts()
    with torch.inference_mode(), offload(model, CXL, session=session):
        cache = model(**asked, use_cache=True).past_key_values
        twin = copy.deepcopy(cache)
        for layer, other in zip(cache.layers, twin.layers, strict=True):
            assert torch.equal(layer.keys, other.keys)
            assert layer.keys.data_ptr() != other.keys.data_ptr()
        with pytest.raises(ConfigError, match="a cache in tiers cannot be pickled: keep the tok"):
            pickle.dumps(cache)


def test_block_says_where_the_bytes_are(session: Session) -> None:
    model = make("llama")
    with offload(model, {"kv": "bind:2", "mlp": "bind:1"}, session=session) as done:
        generate(model)
        assert repr(done) == "<LlamaForCausalLM offloaded, in its block: kv: bind:2, mlp: bind:1>"
        assert repr(done.store) == "<memory by kind, kv: bind:2, mlp: bind:1>"
    rows = {row.kind: row for row in done.placement}
    assert set(rows) == {"kv", "mlp"}
    assert set(rows["kv"].granted) == {2}
    mlp = sum(each.nbytes for name, each in model.named_parameters() if ".mlp." in name)
    assert rows["mlp"].requested_bytes == mlp
    assert str(rows["mlp"]).startswith("mlp (host): ")
    assert " asked for, bind:1 -> node 1: " in str(rows["mlp"])
    assert "outside of its block" in repr(done)


def test_policy_of_a_kind_that_the_model_lacks_is_told(
    session: Session, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    kinds = {"kv": "bind:2", "weights": "bind:1", "experts": "bind:2"}
    offload(make("mixtral"), kinds, session=session)
    assert not caplog.records
    offload(make("llama"), kinds, session=session)
    make("llama").save_pretrained(tmp_path)
    load(tmp_path, {"mlp": "bind:1", "experts": "bind:2"}, session=session)
    said = [record.getMessage() for record in caplog.records]
    told = "policy of experts: LlamaForCausalLM has only embedding, attention, mlp, norm, head"
    assert said.count(told) == 2


def test_load_without_a_policy_of_weights_is_refused(session: Session, tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="load: kv has a policy, and no weights; give one of"):
        load(tmp_path, {"kv": "bind:1"}, session=session)


def test_policy_in_place_of_policies_by_kind_is_refused(session: Session) -> None:
    with pytest.raises(ConfigError, match=r"cxl: no plan has this name; .* \{'weights': 'cxl'\}"):
        offload(make("llama"), "cxl", session=session)
