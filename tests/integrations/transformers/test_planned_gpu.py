"""Plans for a machine with a GPU are carried out by ``offload``; the GPU is one that is not there.

Its memory is the CPU's, its copies are those of the fake driver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from cxl_offload import _C
from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import Offloaded, load, offload
from cxl_offload.integrations.transformers.kinds import kind_of_weight
from cxl_offload.memory import Session
from cxl_offload.ops import attention_by_torch
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import Plan, parse_plan, plan_text
from cxl_offload.plan.transformers import layout
from cxl_offload.plan.transformers.on_gpu import is_shared, parse_shared
from cxl_offload.plan.transformers.plan import TransformersRequest, plan_transformers
from cxl_offload.topology import load_machine

from .fake_accelerator import pinning_session
from .models import PAD, generate, prompts

MACHINE = load_machine("epyc9354-cxl-a")
LAYERS, PROMPT, NEW = 8, 20, 12


@pytest.fixture
def session(driver: _C.FakeDriver, accelerator: str) -> Iterator[Session]:
    with pinning_session(MACHINE, driver) as session:
        yield session


def llama(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=False, pad_token_id=PAD, bos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype).eval()
    model.generation_config.eos_token_id = None
    return model


def request_for(
    folder: Path, model: PreTrainedModel, *, gpu_bytes: int, **asked: Any
) -> TransformersRequest:
    """For a GPU that has so little room."""
    model.config.save_pretrained(folder)
    memory = MACHINE.gpus[0].memory_bytes
    assert memory is not None
    return TransformersRequest(
        model=load_model(str(folder)),
        machine=MACHINE,
        prompt=PROMPT,
        generated=NEW,
        model_name="llama",
        gpu_usable=gpu_bytes / memory,
        replay=None,
        **asked,
    )


def planned(folder: Path, model: PreTrainedModel, **asked: Any) -> Plan:
    """The best plan, read back from its file."""
    plan = plan_transformers(request_for(folder, model, **asked))
    return parse_plan(plan_text(plan), file="plan.yaml")


def answers(model: PreTrainedModel, rows: int, attention: str | None = None) -> torch.Tensor:
    given = prompts(rows, PROMPT)
    return generate(model, attention, **given, max_new_tokens=NEW)


def placed(model: PreTrainedModel, done: Offloaded, session: Session) -> dict[str, Counter[str]]:
    """Bytes by kind and place: of weights as the session knows them, of the cache at its peak."""
    tiers = {node: tier.name for tier in MACHINE.tiers for node in tier.nodes}
    found: dict[str, Counter[str]] = {}
    for name, weight in model.named_parameters():
        places = found.setdefault(kind_of_weight(name, {}), Counter())
        if session.find(weight.data_ptr()) is None:
            places["gpu"] += weight.nbytes
        else:
            for node, count in session.bytes_per_node(weight.data_ptr(), weight.nbytes).items():
                places[tiers[node]] += count
    use = done.store.use().get(("kv", "host"))
    granted = {} if use is None else use.granted
    found["kv"] = Counter({tiers[node]: count for node, count in granted.items()})
    found["kv"]["gpu"] += done.accelerator_kv_bytes
    return found


def check_placement(plan: Plan, found: dict[str, Counter[str]]) -> None:
    """Whole layers to the byte, pages by a twentieth, and the cache's cut by two positions."""
    cache = sum(plan.of("kv").values())
    for kind, places in found.items():
        there, wanted = {at: n for at, n in places.items() if n}, dict(plan.of(kind))
        positions = 2 * cache / (PROMPT + NEW) if kind == "kv" else 0
        if kind != "kv":
            assert there.get("gpu", 0) == wanted.get("gpu", 0), kind
        near = {at: pytest.approx(n, rel=0.05, abs=positions) for at, n in wanted.items()}
        assert there == near, kind


SOME_LAYERS: dict[str, Any] = {"gpu_bytes": 2_000_000, "most_batches": 1, "batches": (4,)}
"""Some layers of a kind stay, the others are streamed."""

CACHE_IN_PARTS: dict[str, Any] = {
    "gpu_bytes": 1_600_000,
    "most_batches": 2,
    "batches": (2,),
    "tiers": ("cxl",),
}
"""A part of the cache is there; the rows of a layer are computed in parts."""


@pytest.fixture(params=[SOME_LAYERS, CACHE_IN_PARTS], ids=["layers", "cache"])
def plan(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Of so small a model, calls of torch cost more than a cache in two places saves: it is asked
    for."""
    if request.param is CACHE_IN_PARTS:
        monkeypatch.setattr(layout, "_KV_HOMES", ("both",))
    made = planned(tmp_path, llama(), **request.param)
    shared = {kind for kind, text in made.policies.items() if is_shared(text)}
    assert shared == ({"kv"} if request.param is CACHE_IN_PARTS else {"mlp"})
    return made


def test_plan_for_a_gpu_puts_every_byte_where_it_says(plan: Plan, session: Session) -> None:
    model = llama(torch.float16)
    with offload(model, plan, session=session) as done:
        answers(model, 4)
        found = placed(model, done, session)
        assert done.rows_at_once == (plan.batch.size if plan.batch.count > 1 else None)
    check_placement(plan, found)


def test_plan_for_a_gpu_gives_the_tokens_of_stock(plan: Plan, session: Session) -> None:
    model = llama()
    stock = answers(model, 4, "sdpa")
    with offload(model, plan, session=session) as done:
        assert torch.equal(answers(model, 4), stock)
    if is_shared(plan.policies["kv"]):
        assert done.calls.joined > 0
    else:
        assert done.calls.kernel == LAYERS * (NEW - 1)
    assert not done.calls.own


def test_plan_may_say_where_hidden_states_lie(tmp_path: Path, session: Session) -> None:
    """No search writes that yet; a plan that was edited carries it, through its file."""
    made = planned(tmp_path, llama(), **{**CACHE_IN_PARTS, "tiers": None})
    assert made.batch.count == 2
    edited = replace(made, policies={**made.policies, "activations": "bind:cxl"})
    plan = parse_plan(plan_text(edited), file="plan.yaml")
    model = llama()
    stock = answers(model, 4, "sdpa")
    with offload(model, plan, session=session) as done:
        assert torch.equal(answers(model, 4), stock)
        assert done.streamed_states is not None
        assert done.streamed_states.copied_out_bytes > 0
    (cxl,) = (tier for tier in MACHINE.tiers if tier.name == "cxl")
    assert set(done.store.use()[("activations", "host")].granted) <= set(cxl.nodes)


def test_what_does_not_stay_crosses_once_a_pass(plan: Plan, session: Session) -> None:
    """As the equations charge it: of all rows, whatever number of them a layer computes at once."""
    model = llama(torch.float16)
    with offload(model, plan, session=session) as done:
        answers(model, 4)
        assert done.streamed is not None
        copied = done.streamed.copied_bytes
    on_host = [plan.of(kind) for kind in ("attention", "mlp", "head", "norm")]
    each = sum(n for places in on_host for at, n in places.items() if at != "gpu")
    assert each
    assert copied == pytest.approx(NEW * each, rel=0.1)  # the first of the next pass is on its way


def test_shares_that_are_not_carried_out_are_found_out(
    plan: Plan, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control of the placement: without its shares the same plan puts bytes elsewhere."""
    shares = {k: parse_shared(p)[1] if is_shared(p) else p for k, p in plan.policies.items()}
    model = llama(torch.float16)
    with offload(model, replace(plan, policies=shares), session=session) as done:
        answers(model, 4)
        found = placed(model, done, session)
    with pytest.raises(AssertionError, match="kv" if is_shared(plan.policies["kv"]) else "mlp"):
        check_placement(plan, found)


def test_damage_in_a_layer_that_stays_changes_the_tokens(tmp_path: Path, session: Session) -> None:
    """A control of the tokens: what stays is what is read, and so is what is streamed."""
    model, plan = llama(), planned(tmp_path, llama(), **SOME_LAYERS)
    stock = answers(model, 4, "sdpa")
    with offload(model, plan, session=session):
        stays = layers_there(model, session)
        assert 0 < sum(stays) < LAYERS
        for at in (stays.index(True), stays.index(False)):
            weight = layers(model)[at].mlp.up_proj.weight
            kept = weight.detach().clone()
            with torch.no_grad():
                weight.mul_(-1)
                assert not torch.equal(answers(model, 4), stock)
                weight.copy_(kept)
                assert torch.equal(answers(model, 4), stock)


def layers(model: PreTrainedModel) -> Any:
    return model.model.layers


def layers_there(model: PreTrainedModel, session: Session) -> list[bool]:
    """Whether the MLP of a layer stays on the accelerator."""
    weights = (layer.mlp.up_proj.weight for layer in layers(model))
    return [session.find(weight.data_ptr()) is None for weight in weights]


def test_layers_that_stay_are_spread_and_go_back(tmp_path: Path, session: Session) -> None:
    model, before = llama(), llama().state_dict()
    policies = {"mlp": "gpu:0.25,cxl", "kv": "ldram"}
    with offload(model, policies, accelerator="cuda", session=session):
        stays = layers_there(model, session)
    assert stays == [False, False, False, True] * 2
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_plan_is_loaded_to_its_place(plan: Plan, tmp_path: Path, session: Session) -> None:
    """``load`` leaves in ordinary memory what the block takes to the accelerator."""
    llama(torch.float16).save_pretrained(tmp_path / "saved")
    model = load(tmp_path / "saved", plan, session=session)
    model.generation_config.eos_token_id = None
    with offload(model, plan, session=session) as done:
        answers(model, 4)
        found = placed(model, done, session)
    check_placement(plan, found)
    del model, done


def test_planned_room_of_joining_is_what_the_operator_takes() -> None:
    assert layout.JOINED_BYTES == 2 * attention_by_torch._MOST_COPIED_BYTES


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ({"mlp": "gpu:2,cxl"}, "'2' is no share of the layers"),
        ({"mlp": "gpu:0.5"}, "does not say where the other layers lie"),
        ({"head": "gpu:0.5,cxl"}, "policy of head: gpu:0.5,cxl: shares are of layers"),
    ],
)
def test_odd_shares_are_refused(policies: dict[str, str], message: str, session: Session) -> None:
    with pytest.raises(ConfigError, match=message):
        offload(llama(), policies, accelerator="cuda", session=session)


def test_shares_without_an_accelerator_are_refused(session: Session) -> None:
    with pytest.raises(ConfigError, match=r"gpu:0.5,cxl: no accelerator computes; .* cxl alone"):
        offload(llama(), {"mlp": "gpu:0.5,cxl"}, session=session)


def test_share_of_all_weights_is_of_those_in_layers_that_are_not_named(session: Session) -> None:
    model = llama()
    stock = answers(model, 4, "sdpa")
    policies = {"weights": "gpu:0.5,cxl", "norm": "gpu"}
    with offload(model, policies, accelerator="cuda", session=session) as done:
        assert torch.equal(answers(model, 4), stock)
        found = placed(model, done, session)
    for kind in ("attention", "mlp"):
        assert found[kind]["gpu"] == found[kind]["cxl"]
    assert set(found["norm"]) == {"gpu"}
    assert set(found["embedding"]) == set(found["head"]) == {"cxl"}


def test_plan_that_keeps_all_on_the_gpu_is_carried_out(tmp_path: Path, session: Session) -> None:
    """With one batch the cache is transformers' own; with several it is one of parts."""
    made = planned(tmp_path, llama(), gpu_bytes=1 << 30, most_batches=2, batches=(2,))
    assert made.batch.count == 2
    llama().save_pretrained(tmp_path / "saved")
    alone = replace(made, policies=dict.fromkeys(made.policies, "gpu"))
    alone = replace(alone, batch=replace(made.batch, size=4, count=1))
    stock = answers(llama(), 4, "sdpa")
    for plan in (made, alone):
        model = load(tmp_path / "saved", plan, session=session)
        model.generation_config.eos_token_id = None
        with offload(model, plan, session=session) as done:
            assert torch.equal(answers(model, 4), stock)
            found = placed(model, done, session)
        assert all(set(places) == {"gpu"} for kind, places in found.items() if kind != "kv")
        assert done.accelerator_kv_bytes > 0 or plan is alone
        assert done.rows_at_once == (2 if plan is made else None)
        del model, done
