"""Weights by kind: where they lie, what they cost on the way, and that they are the same."""

from __future__ import annotations

import functools
import gc
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, core_model_loading

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import load, offload
from cxl_offload.integrations.transformers.kinds import kind_of_weight
from cxl_offload.integrations.transformers.weights import (
    meta_model,
    place_weights,
    store_for,
    weight_bytes,
)
from cxl_offload.memory import Bind, Session
from cxl_offload.objects.experts import expert_parts

from .conftest import machine
from .models import generate, make


def nodes_by_kind(model: PreTrainedModel, session: Session) -> dict[str, set[int]]:
    """Where the weights of every kind are, asked from their pages."""
    found: dict[str, set[int]] = {}
    for name, weight in model.named_parameters():
        kind = kind_of_weight(name, model.all_tied_weights_keys)
        on = session.bytes_per_node(weight.data_ptr(), weight.nbytes)
        found.setdefault(kind, set()).update(on)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("opt", {"attention", "mlp", "norm", "embedding", "head"}),
        ("llama", {"attention", "mlp", "norm", "embedding", "head"}),
        ("gemma2", {"attention", "mlp", "norm", "embedding", "head"}),
        ("phi", {"attention", "mlp", "norm", "embedding", "head"}),
        ("gpt2", {"attention", "mlp", "norm", "embedding", "head"}),
        ("mixtral", {"attention", "mlp", "experts", "norm", "embedding", "head"}),
        ("qwen2-moe", {"attention", "mlp", "experts", "norm", "embedding", "head"}),
    ],
)
def test_every_kind_goes_to_its_own_node_and_back(
    family: str, kinds: set[str], session: Session
) -> None:
    model = make(family)
    stock = generate(model, "sdpa")
    asked = {"weights": "bind:0", "mlp": "bind:2", "experts": "bind:1", "norm": "bind:1"}
    with offload(model, {**asked, "kv": "bind:2"}, session=session) as done:
        lies = nodes_by_kind(model, session)
        tokens = generate(model)
        held = {kind: use.live_bytes for (kind, _), use in done.store.use().items()}
    expected = {"mlp": {2}, "experts": {1}, "norm": {1}}
    assert lies == {kind: expected.get(kind, {0}) for kind in kinds}
    assert sum(held[kind] for kind in kinds) == sum(w.nbytes for w in model.parameters())
    if family != "gemma2":  # whose soft cap stock sdpa drops
        assert torch.equal(tokens, stock)
    assert session.stats().asked_bytes.current == 0
    assert torch.equal(generate(model, "sdpa"), stock)


def test_embedding_that_is_the_head_too_lies_with_the_head(session: Session) -> None:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            tie_word_embeddings=True,
        )
    )
    with offload(model, {"head": "bind:2", "embedding": "bind:1"}, session=session):
        assert nodes_by_kind(model, session)["head"] == {2}
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_weights_that_do_not_fit_are_back_in_ordinary_memory() -> None:
    small = Session.simulated(machine(cxl_bytes=64 << 20))
    model = make("llama")
    model.lm_head.weight = torch.nn.Parameter(torch.ones(300_000, 64))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with (
        pytest.raises(MemoryError, match="node 2"),
        offload(model, {"weights": "bind:2"}, session=small),
    ):
        pass
    assert small.stats().asked_bytes.peak > 0  # some were there
    assert small.stats().asked_bytes.current == 0
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name]), name


def test_checkpoint_is_loaded_to_its_place(folder: Path, session: Session) -> None:
    policies = {"weights": "bind:2", "norm": "bind:0", "kv": "bind:1"}
    model = load(folder, policies, session=session)
    lies = nodes_by_kind(model, session)
    assert lies.pop("norm") == {0}
    assert set(map(frozenset, lies.values())) == {frozenset({2})}
    model.generation_config.eos_token_id = None
    with offload(model, {"kv": "bind:1"}, session=session):
        tokens = generate(model)
    assert torch.equal(tokens, generate(make("llama"), "sdpa"))
    del model


def test_weights_loaded_to_their_place_are_not_moved_again(folder: Path, session: Session) -> None:
    model = load(folder, {"weights": "bind:2"}, session=session)
    places = [weight.data_ptr() for weight in model.parameters()]
    with offload(model, {"weights": "bind:2", "norm": "bind:0"}, session=session):
        assert nodes_by_kind(model, session)["norm"] == {0}
    kept = [weight.data_ptr() for weight in model.parameters()]
    moved = [
        name for at, (name, _) in enumerate(model.named_parameters()) if places[at] != kept[at]
    ]
    assert moved
    assert all("norm" in name for name in moved)
    del model


def test_experts_are_stacked_on_the_way_to_their_place(tmp_path: Path, session: Session) -> None:
    """The checkpoint has them one by one, transformers computes with one tensor of all."""
    stock = make("mixtral")
    stock.save_pretrained(tmp_path)
    model = load(tmp_path, {"experts": "bind:2"}, session=session)
    assert nodes_by_kind(model, session)["experts"] == {2}
    for name, weight in stock.named_parameters():
        assert torch.equal(weight, model.get_parameter(name)), name
    del model


def test_no_model_is_in_memory_twice_while_it_is_loaded(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anonymous memory of this process beside what the tiers hold, at every weight."""
    wide = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 2048}
    config = LlamaConfig(**wide, num_hidden_layers=6, num_attention_heads=4)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    stock, beside = core_model_loading.set_param_for_module, []

    @functools.wraps(stock)
    def watched(*args: object) -> None:
        beside.append(anonymous_bytes() - session.stats().asked_bytes.current)
        stock(*args)

    monkeypatch.setattr(core_model_loading, "set_param_for_module", watched)
    start = anonymous_bytes()
    model = load(tmp_path, {"weights": "bind:2"}, session=session)
    sizes = [weight.nbytes for weight in model.parameters()]
    assert sum(sizes) > 100e6
    assert len(beside) == len(sizes)
    assert max(beside) - start < 3 * max(sizes)  # 25 MiB; a second copy would be 117 MiB
    del model


def test_memory_beside_the_placement_is_two_percent_of_it_at_most(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model of many layers, besides what an interpreter and its allocator take once."""
    shape = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}
    config = LlamaConfig(**shape, num_hidden_layers=48, num_attention_heads=4)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    stock, beside = core_model_loading.set_param_for_module, []

    @functools.wraps(stock)
    def watched(*args: object) -> None:
        beside.append(anonymous_bytes() - session.stats().asked_bytes.current)
        stock(*args)

    monkeypatch.setattr(core_model_loading, "set_param_for_module", watched)
    load(tmp_path, {"weights": "bind:2"}, session=session)  # what loading costs the first time
    gc.collect()
    session.trim()
    start = anonymous_bytes() - session.stats().asked_bytes.current
    beside.clear()
    model = load(tmp_path, {"weights": "bind:2"}, session=session)
    placed = session.stats().asked_bytes.current
    assert placed > 120e6
    assert max(beside) - start <= 0.02 * placed
    del model


def test_checkpoint_larger_than_the_local_node_runs_with_the_rest_on_another(
    tmp_path: Path,
) -> None:
    stock = make("llama")
    stock.resize_token_embeddings(20_000)
    total = sum(weight.nbytes for weight in stock.parameters())
    stock.save_pretrained(tmp_path)
    limit = total // 2
    session = Session.simulated(machine(), limits={0: limit})
    with pytest.raises(MemoryError, match=r"^node 0: .* needed \(.*\), .* free; .*$") as refused:
        load(tmp_path, {"weights": "bind:0"}, session=session)
    assert len(str(refused.value).splitlines()) == 1
    assert session.stats().asked_bytes.peak == 0  # nothing was allocated for it
    model = load(tmp_path, {"weights": "bind:0,2"}, session=session)
    model.generation_config = stock.generation_config
    held = {node: use.current_bytes for node, use in session.stats().nodes.items()}
    assert limit - (1 << 20) < held[0] <= limit
    assert held[0] + held[2] >= total
    with offload(model, {"kv": "bind:2"}, session=session):
        tokens = generate(model)
    assert torch.equal(tokens, generate(stock, "sdpa"))
    del model
    gc.collect()
    assert session.stats().asked_bytes.current == 0
    del tokens
    model = load(tmp_path, {"weights": "bind:0,2"}, session=session)  # what the pool kept is free
    del model


def anonymous_bytes() -> int:
    rows = Path("/proc/self/status").read_text().splitlines()
    line = next(row for row in rows if row.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_loading_leaves_transformers_as_it_was(folder: Path, session: Session) -> None:
    before = core_model_loading.set_param_for_module
    load(folder, {"weights": "bind:2"}, session=session)
    assert core_model_loading.set_param_for_module is before


def test_loader_of_another_shape_is_refused(
    folder: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_model_loading, "set_param_for_module", lambda name, value: None)
    with pytest.raises(ConfigError, match="load the model as usual"):
        load(folder, {"weights": "bind:2"}, session=session)


def test_folder_without_a_checkpoint_is_refused(tmp_path: Path, session: Session) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        load(tmp_path, {"weights": "bind:2"}, session=session)


def test_bytes_of_kinds_are_known_before_loading(folder: Path) -> None:
    model = make("llama")
    found = weight_bytes(meta_model(folder))
    assert sum(found.values()) == sum(weight.nbytes for weight in model.parameters())
    assert found["head"] == model.lm_head.weight.nbytes


SOME_EXPERTS = {"experts": "bind:2", "experts:0,2-3": "bind:1", "kv": "bind:0"}


def nodes_by_expert(model: torch.nn.Module, session: Session) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for part in expert_parts(model):
        span = part.weight.data_ptr(), part.weight.nbytes
        found.setdefault(part.expert, set()).update(session.bytes_per_node(*span))
    return found


@pytest.mark.parametrize("way", ["moved", "loaded"])
def test_experts_lie_where_their_numbers_say(way: str, tmp_path: Path, session: Session) -> None:
    model = make("mixtral")
    stock = generate(model, "sdpa")
    if way == "loaded":
        model.save_pretrained(tmp_path)
        options = model.generation_config
        model = load(tmp_path, SOME_EXPERTS, session=session)
        model.generation_config = options
    with offload(model, SOME_EXPERTS, session=session):
        assert nodes_by_expert(model, session) == {0: {1}, 1: {2}, 2: {1}, 3: {1}}
        assert torch.equal(generate(model), stock)
    del model


def test_experts_with_weights_of_their_own_go_one_by_one(session: Session) -> None:
    layer = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
    model = torch.nn.ModuleDict({"experts": layer})
    store = store_for({"experts": Bind((2,)), "experts:1": Bind((1,))}, session)
    back = place_weights(model, store)  # type: ignore[arg-type]
    assert nodes_by_expert(model, session) == {0: {2}, 1: {1}, 2: {2}}
    assert store.use()[("experts", "1")].live_bytes == 65 * 64 * 4
    back()


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ({"experts:0": "cxl"}, "needs a policy for the other experts"),
        ({"experts": "cxl", "experts:3-1": "ldram"}, "names no experts"),
        ({"experts": "cxl", "experts:": "ldram"}, "names no experts"),
        ({"experts": "cxl", "experts:0-2": "ldram", "experts:2": "rdram"}, "expert 2 is in"),
    ],
)
def test_experts_that_cannot_be_are_refused(
    policies: dict[str, str], message: str, session: Session
) -> None:
    with pytest.raises(ConfigError, match=message):
        offload(make("mixtral"), policies, session=session)


def test_expert_that_a_layer_lacks_is_refused(session: Session) -> None:
    with (
        pytest.raises(ConfigError, match="experts 0 to 3"),
        offload(make("mixtral"), {"experts": "cxl", "experts:4": "ldram"}, session=session),
    ):
        pass


def test_bytes_of_named_experts_are_known_before_loading(tmp_path: Path) -> None:
    make("mixtral").save_pretrained(tmp_path)
    model = meta_model(tmp_path)
    whole, split = weight_bytes(model), weight_bytes(model, SOME_EXPERTS)
    assert split["experts:0,2-3"] == 3 * split["experts"]
    assert split["experts"] + split["experts:0,2-3"] == whole["experts"]
