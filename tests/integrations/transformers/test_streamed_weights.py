"""Weights streamed from tiers to an accelerator that is not there, a stage ahead of their use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from cxl_offload import _C
from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import load, offload
from cxl_offload.integrations.transformers.on_accelerator import (
    WeightHomes,
)
from cxl_offload.integrations.transformers.streamed_weights import WeightStage, WeightStream
from cxl_offload.memory import Session
from cxl_offload.tensor import empty
from cxl_offload.transfer import CopyHandle

from .conftest import machine
from .fake_accelerator import (
    COMPUTE,
    FakeCopies,
    LateCopies,
    UnfencedCopies,
    fake_accelerator,
    pinning_session,
)
from .models import FAMILIES, generate, make

FAR = {"weights": "bind:2", "kv": "bind:0"}


@pytest.fixture
def session(driver: _C.FakeDriver) -> Iterator[Session]:
    with pinning_session(machine(), driver) as session:
        yield session


def saved(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def assert_as_before(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]), name
    for module in model.modules():
        assert not module._forward_hooks, type(module).__name__
        assert not module._forward_pre_hooks, type(module).__name__


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_stock(family: str, session: Session, accelerator: str) -> None:
    model = make(family)
    own = "eager" if family in ("gemma2", "gpt-oss") else "sdpa"
    stock, before = generate(model, own), saved(model)
    with offload(model, FAR, accelerator=accelerator, session=session) as done:
        tokens = generate(model)
        assert done.streamed is not None
        layers = sum(each.nbytes for each in layer_weights(model))
        assert done.streamed.copied_bytes > 9 * layers
    assert torch.equal(tokens, stock)
    assert_as_before(model, before)


def layer_weights(model: nn.Module) -> list[torch.Tensor]:
    return [weight for name, weight in model.named_parameters() if ".0." in name or ".1." in name]


def test_weights_lie_pinned_in_their_tiers_and_two_buffers_are_all_there_is(
    session: Session, accelerator: str
) -> None:
    model = make("llama")
    with offload(model, FAR, accelerator=accelerator, session=session) as done:
        for name, weight in model.named_parameters():
            owner = session.find(weight.data_ptr())
            assert owner is not None, name
            assert owner.pinned, name
            assert set(session.bytes_per_node(weight.data_ptr(), weight.nbytes)) == {2}
        generate(model)
        assert done.streamed is not None
        buffers = done.streamed._buffers
        largest = WeightHomes.of(model, done.store.parts).largest_stage_bytes
        assert [buffer.memory.nbytes for buffer in buffers] == [largest, largest]
    assert buffers == []


def test_weights_that_were_loaded_to_their_place_are_pinned_there(
    tmp_path: Path, session: Session, accelerator: str
) -> None:
    make("llama").save_pretrained(tmp_path)
    model = load(tmp_path, {"weights": "bind:2"}, session=session)
    model.generation_config.eos_token_id = None
    with offload(model, FAR, accelerator=accelerator, session=session):
        assert all(
            owner is not None and owner.pinned
            for owner in (session.find(each.data_ptr()) for each in model.parameters())
        )
        tokens = generate(model)
    assert torch.equal(tokens, generate(make("llama"), "sdpa"))


def test_damaged_buffer_changes_the_tokens(
    monkeypatch: pytest.MonkeyPatch, session: Session, driver: _C.FakeDriver
) -> None:
    class Damaging(FakeCopies):
        def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> CopyHandle:
            handle = super().copy(target, source, after)
            if source.dim() == 2 and source.shape[0] == 96:
                handle.wait()
                target.mul_(-1)
            return handle

    fake_accelerator(monkeypatch, lambda session: Damaging(session, driver))
    model = make("llama")
    stock, before = generate(model, "sdpa"), saved(model)
    with offload(model, FAR, accelerator="cuda", session=session):
        tokens = generate(model)
    assert not torch.equal(tokens, stock)
    assert_as_before(model, before)


def test_embedding_that_is_the_head_too_is_looked_up_and_streamed(
    session: Session, accelerator: str
) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        tie_word_embeddings=True,
        pad_token_id=1,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    stock = generate(model, "sdpa")
    with offload(model, FAR, accelerator=accelerator, session=session) as done:
        homes = WeightHomes.of(model, done.store.parts)
        assert "lm_head" in [stage.name for stage in homes.stages]
        assert homes.looked_up == (model.model.embed_tokens,)
        assert torch.equal(generate(model), stock)
        assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    "options", [{"rows_at_once": 3}, {"linear_rows": 8}, {"kv_dtype": torch.float8_e4m3fn}]
)
def test_other_options_compute_as_without_an_accelerator(
    options: dict[str, Any], session: Session, accelerator: str
) -> None:
    model = make("llama")
    with offload(model, FAR, session=session, **options):
        expected = generate(model)
    with offload(model, FAR, accelerator=accelerator, session=session, **options):
        assert torch.equal(generate(model), expected)


def test_beams_and_a_cache_of_the_models_own(session: Session, accelerator: str) -> None:
    model = make("qwen2")
    stock = generate(model, "sdpa", num_beams=2)
    with offload(model, {"weights": "bind:2"}, accelerator=accelerator, session=session):
        assert torch.equal(generate(model, num_beams=2), stock)


@pytest.mark.parametrize("nth", [1, 3, 30])
def test_refused_copy_ends_the_call_and_returns_all_memory(
    nth: int, session: Session, driver: _C.FakeDriver, accelerator: str
) -> None:
    model = make("llama")
    stock, before = generate(model, "sdpa"), saved(model)
    with offload(model, FAR, accelerator=accelerator, session=session):
        driver.fail_copy(nth)
        with pytest.raises(OSError, match="refused"):
            generate(model)
        assert torch.equal(generate(model), stock)  # the next call has its weights again
    assert_as_before(model, before)


def test_error_inside_of_a_layer_leaves_the_model_as_it_was(
    session: Session, accelerator: str
) -> None:
    model = make("llama")
    before = saved(model)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with offload(model, FAR, accelerator=accelerator, session=session):
        removable = model.model.layers[1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            generate(model)
        removable.remove()
    assert_as_before(model, before)


def test_weight_that_is_written_to_is_copied_again(session: Session, accelerator: str) -> None:
    model = make("llama")
    with offload(model, FAR, accelerator=accelerator, session=session):
        generate(model)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.down_proj.weight.mul_(-1)
        changed = generate(model)
    assert torch.equal(changed, generate(model, "sdpa"))
    assert not torch.equal(changed, generate(make("llama"), "sdpa"))


def test_gradients_and_training_are_refused_when_they_are_asked_for(
    session: Session, accelerator: str
) -> None:
    model = make("llama")
    ids = torch.tensor([[3, 4, 5]])
    with offload(model, FAR, accelerator=accelerator, session=session):
        with pytest.raises(ConfigError, match=r"no gradients.*no_grad"):
            model(ids)
        with torch.no_grad():
            model(ids)


# The stream alone -------------------------------------------------------------------------------


def stages(session: Session, count: int) -> list[WeightStage]:
    made = []
    for at in range(count):
        module = nn.Linear(16, 16 + at, bias=True)
        for weight in module.parameters():
            shape = tuple(weight.shape)
            weight.data = empty(shape, policy="bind:2", pin=True, session=session).fill_(at + 1)
        made.append(WeightStage(f"stage {at}", module, tuple(module.parameters())))
    return made


def read_late(
    stream: WeightStream, made: list[WeightStage], order: list[int], driver: _C.FakeDriver
) -> list[torch.Tensor]:
    """What work that is queued while a stage computes, and runs much later, finds there."""
    found = []
    for at in order:
        stream.begin(at)
        view = made[at].weights[0].data
        seen = torch.zeros(view.shape)
        driver.copy(
            target=seen.data_ptr(), source=view.data_ptr(), nbytes=view.nbytes, stream=COMPUTE
        )
        found.append(seen)
        stream.end(at)
    return found


@pytest.mark.parametrize("order", [[0, 1, 2, 3] * 3, [0, 3, 1, 2] * 3, [2, 2, 0, 1, 3, 0]])
@pytest.mark.parametrize("kind", [LateCopies, UnfencedCopies])
def test_buffer_is_never_overwritten_while_work_that_reads_it_waits(
    order: list[int], kind: type[LateCopies], session: Session, driver: _C.FakeDriver
) -> None:
    """The control copies without waiting for readers, and is found out."""
    made, copies = stages(session, 4), kind(session, driver)
    stream = WeightStream(made, copies)
    found = read_late(stream, made, order, driver)
    assert copies.engine._core is not None
    for each in copies.engine._core.streams:  # copies run as early as they may
        driver.finish(each)
    driver.finish(COMPUTE)
    right = [bool((seen == at + 1).all()) for seen, at in zip(found, order, strict=True)]
    assert all(right) is (kind is LateCopies), right
    stream.close()
    copies.close()
    assert [float(each.weights[0].data.mean()) for each in made] == [1, 2, 3, 4]


def test_next_stage_is_on_its_way_while_one_computes_and_order_is_learned(
    session: Session, driver: _C.FakeDriver
) -> None:
    made, copies = stages(session, 4), FakeCopies(session, driver)
    stream = WeightStream(made, copies)
    sizes = [sum(weight.nbytes for weight in stage.weights) for stage in made]
    stream.begin(0)
    assert stream.copied_bytes == sizes[0] + sizes[1]
    stream.end(0)
    order = [1, 3, 2, 0] * 3
    for at in order:
        stream.begin(at)
        stream.end(at)
    before = stream.copied_bytes
    for at in order:
        stream.begin(at)
        stream.end(at)
    assert stream.copied_bytes - before == 3 * sum(sizes)  # none that was not used
    stream.close()
    copies.close()


# Refusals ---------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cuda", r"accelerator cuda: torch .* finds no CUDA device; leave accelerator out"),
        ("cuda:7", r"accelerator cuda:7: torch .* finds no CUDA device"),
        ("cpu", r"accelerator cpu: weights are streamed to CUDA devices"),
        ("gpu", r"accelerator 'gpu': give cuda, or cuda:0"),
    ],
)
def test_accelerators_that_are_not_there_are_refused(
    name: str, said: str, session: Session
) -> None:
    model = make("llama")
    places = [weight.data_ptr() for weight in model.parameters()]
    with pytest.raises(ConfigError, match=said) as error:
        offload(model, FAR, accelerator=name, session=session)
    assert "\n" not in str(error.value)
    assert places == [weight.data_ptr() for weight in model.parameters()]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tune": "step_time"}, "tune is for models that compute on the CPU"),
        ({"near_expert_bytes": 5}, "near_expert_bytes is for models"),
    ],
)
def test_options_that_move_weights_are_refused(
    options: dict[str, Any], said: str, session: Session, accelerator: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        offload(make("llama"), FAR, accelerator=accelerator, session=session, **options)


def spoiled(change: Callable[[Any], object]) -> Any:
    model = make("llama")
    change(model)
    return model


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model.train(), "is in training mode"),
        (lambda model: setattr(model, "hf_device_map", {"": "cpu"}), "dispatched by accelerate"),
        (lambda model: model.to("meta"), "is on meta; load the model to the CPU"),
    ],
)
def test_models_that_are_not_streamed_are_refused(
    change: Callable[[Any], object], said: str, session: Session, accelerator: str
) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        offload(spoiled(change), FAR, accelerator=accelerator, session=session)
    assert "\n" not in str(error.value)
    assert session.stats().asked_bytes.peak == 0
