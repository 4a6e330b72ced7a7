"""Experts copied one by one to an accelerator that is not there, by who was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from cxl_offload import _C
from cxl_offload.integrations.transformers import offload
from cxl_offload.integrations.transformers.asked_experts import expert_layers
from cxl_offload.integrations.transformers.scope import Offloaded
from cxl_offload.memory import Session
from cxl_offload.transfer import CopyHandle

from .conftest import machine
from .fake_accelerator import FakeCopies, fake_accelerator, pinning_session
from .models import generate, make, prompts

FAR = {"weights": "bind:2", "kv": "bind:0"}
MIXTURES = ("mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss")
PASSES = 10


@pytest.fixture
def session(driver: _C.FakeDriver) -> Iterator[Session]:
    with pinning_session(machine(), driver) as session:
        yield session


def own(family: str) -> str:
    return "eager" if family == "gpt-oss" else "sdpa"


def answer(model: Any, rows: int, attention: str | None = None) -> torch.Tensor:
    """Tokens for so many of the prompts."""
    given: dict[str, Any] = prompts(rows)
    return generate(model, attention, **given)


class Asked:
    """Every set of experts that a layer asked for, and the bytes of one of its experts."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[tuple[str, set[int]]] = []
        self.layers = expert_layers(model)
        for name, layer in self.layers.items():
            layer.register_forward_pre_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.calls.append((name, set(args[1].flatten().tolist())))

        return hook

    def expert_bytes(self, name: str) -> int:
        layer = self.layers[name]
        return int(layer.gate_up_proj[0].nbytes + layer.down_proj[0].nbytes)

    def nbytes(self, first: int = 0) -> int:
        """Of the experts that were asked for, from this call on."""
        return sum(len(found) * self.expert_bytes(name) for name, found in self.calls[first:])

    def all_bytes(self) -> int:
        """Of the experts of all layers."""
        return sum(
            layer.num_experts * self.expert_bytes(name) for name, layer in self.layers.items()
        )


def poison(done: Offloaded) -> None:
    """What is read without having been copied is no number."""
    assert done.streamed is not None
    for buffer in done.streamed._buffers:
        buffer.memory.fill_(0xFF)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("family", MIXTURES)
def test_tokens_are_those_of_stock_and_only_asked_experts_are_copied(
    family: str, implementation: str, rows: int, session: Session, accelerator: str
) -> None:
    """The prompt asks for all experts, each token after it for those of its rows."""
    model = make(family)
    model.set_experts_implementation(implementation)
    stock = answer(model, rows, own(family))
    asked = Asked(model)
    with offload(model, FAR, accelerator=accelerator, session=session) as done:
        poison(done)
        tokens = answer(model, rows)
        assert done.streamed is not None
        layers = len(asked.layers)
        assert len(asked.calls) == PASSES * layers
        assert asked.nbytes(layers) < (PASSES - 1) * asked.all_bytes()
        expected = asked.all_bytes() + asked.nbytes(layers)
        assert done.streamed.expert_copied_bytes == expected
        assert done.streamed.expert_bytes == PASSES * asked.all_bytes()
    assert torch.equal(tokens, stock)


@pytest.mark.parametrize("family", MIXTURES)
def test_tokens_of_bfloat16_are_those_without_an_accelerator(
    family: str, session: Session, accelerator: str
) -> None:
    model = make(family, torch.bfloat16)
    with offload(model, {"kv": "bind:0"}, session=session):
        near = answer(model, 1)
    with offload(model, FAR, accelerator=accelerator, session=session) as done:
        poison(done)
        assert torch.equal(answer(model, 1), near)
        assert done.streamed is not None
        assert done.streamed.expert_copied_bytes < done.streamed.expert_bytes


def test_a_batch_that_asks_for_all_in_the_mean_has_whole_layers_copied_ahead(
    session: Session, accelerator: str
) -> None:
    model = make("mixtral")
    stock = generate(model, "sdpa")
    with offload(model, FAR, accelerator=accelerator, session=session) as done:
        assert torch.equal(generate(model), stock)  # four rows, two of four experts each
        assert done.streamed is not None
        assert done.streamed.expert_copied_bytes == done.streamed.expert_bytes


def test_rows_in_parts_copy_an_expert_once_a_step(session: Session, accelerator: str) -> None:
    model = make("mixtral")
    stock = answer(model, 2, "sdpa")
    asked = Asked(model)
    with offload(model, FAR, accelerator=accelerator, session=session, rows_at_once=1) as done:
        poison(done)
        assert torch.equal(answer(model, 2), stock)
        layers, parts = len(asked.layers), asked.calls
        joined = [  # two parts of a layer follow each other
            (name, found | other)
            for (name, found), (_, other) in zip(parts[::2], parts[1::2], strict=True)
        ]
        asked.calls = joined
        assert len(joined) == PASSES * layers
        assert done.streamed is not None
        assert done.streamed.expert_copied_bytes == asked.all_bytes() + asked.nbytes(layers)


def read_all(
    self: Any, states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Multiplies every token by every expert, by nothing where it did not ask."""
    made: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, states, index, weights)
    made = made + 0 * (self.gate_up_proj.sum() + self.down_proj.sum())
    return made


def whole_by_implementation(model: Any) -> None:
    ALL_EXPERTS_FUNCTIONS.register("reads_all", read_all)
    model.set_experts_implementation("reads_all")


def whole_by_forward(model: Any) -> None:
    for layer in expert_layers(model).values():
        layer.forward = lambda *given, layer=layer: read_all(layer, *given)


@pytest.mark.parametrize("change", [whole_by_implementation, whole_by_forward])
def test_experts_that_others_compute_are_copied_whole(
    change: Any, session: Session, accelerator: str
) -> None:
    model = make("mixtral")
    stock = answer(model, 1, "sdpa")
    change(model)
    with offload(model, FAR, accelerator=accelerator, session=session) as done:
        poison(done)
        assert torch.equal(answer(model, 1), stock)
        assert done.streamed is not None
        assert done.streamed.expert_copied_bytes == done.streamed.expert_bytes


def test_damaged_experts_change_the_tokens(
    monkeypatch: pytest.MonkeyPatch, session: Session, driver: _C.FakeDriver
) -> None:
    class Damaging(FakeCopies):
        def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> CopyHandle:
            handle = super().copy(target, source, after)
            if source.dim() == 3 and source.shape[0] < 4:  # after the prompt
                handle.wait()
                target.mul_(-1)
            return handle

    fake_accelerator(monkeypatch, lambda session: Damaging(session, driver))
    model = make("qwen3-moe")
    stock = answer(model, 1, "sdpa")
    with offload(model, FAR, accelerator="cuda", session=session):
        assert not torch.equal(answer(model, 1), stock)
    assert torch.equal(answer(model, 1, "sdpa"), stock)


def test_expert_that_is_written_to_is_copied_again(session: Session, accelerator: str) -> None:
    model = make("mixtral")
    stock = answer(model, 1, "sdpa")
    with offload(model, FAR, accelerator=accelerator, session=session):
        answer(model, 1)
        with torch.no_grad():
            for layer in expert_layers(model).values():
                layer.down_proj.mul_(-1)
        changed = answer(model, 1)
    assert not torch.equal(changed, stock)
    assert torch.equal(changed, answer(model, 1, "sdpa"))


@pytest.mark.parametrize("nth", [1, 2, 7])
def test_refused_copy_of_an_expert_ends_the_call_and_returns_all_memory(
    nth: int, monkeypatch: pytest.MonkeyPatch, session: Session, driver: _C.FakeDriver
) -> None:
    seen = 0

    class Refusing(FakeCopies):
        def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> CopyHandle:
            nonlocal seen
            if source.dim() == 3 and source.shape[0] < 4:
                seen += 1
                if seen == nth:
                    self.driver.fail_copy(1)
            return super().copy(target, source, after)

    fake_accelerator(monkeypatch, lambda session: Refusing(session, driver))
    model = make("mixtral")
    stock = answer(model, 1, "sdpa")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with offload(model, FAR, accelerator="cuda", session=session):
        with pytest.raises(OSError, match="refused"):
            answer(model, 1)
        assert torch.equal(answer(model, 1), stock)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]), name
    for module in model.modules():
        assert not module._forward_pre_hooks, type(module).__name__


def test_error_between_router_and_experts_leaves_the_model_as_it_was(
    session: Session, accelerator: str
) -> None:
    model = make("mixtral")
    stock = answer(model, 1, "sdpa")

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with offload(model, FAR, accelerator=accelerator, session=session):
        removable = model.model.layers[1].mlp.experts.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            answer(model, 1)
        removable.remove()
        assert torch.equal(answer(model, 1), stock)


def test_experts_alone_are_streamed(session: Session, accelerator: str) -> None:
    """All else stays on the accelerator, and nothing is copied ahead."""
    model = make("qwen3-moe")
    stock = answer(model, 1, "sdpa")
    asked = Asked(model)
    far = {"experts": "bind:2", "kv": "bind:0"}
    with offload(model, far, accelerator=accelerator, session=session) as done:
        poison(done)
        assert torch.equal(answer(model, 1), stock)
        assert done.streamed is not None
        assert done.streamed.copied_bytes == done.streamed.expert_copied_bytes
        assert done.streamed.expert_copied_bytes < done.streamed.expert_bytes
        assert asked.calls


def test_caller_that_reads_the_weights_itself_finds_them(
    session: Session, accelerator: str
) -> None:
    """No call of the experts says then that they are read."""
    model = make("mixtral")
    stock = answer(model, 1, "sdpa")
    for layer in model.model.layers:
        block = layer.mlp

        def forward(states: torch.Tensor, block: Any = block) -> torch.Tensor:
            rows = states.view(-1, states.shape[-1])
            _, weights, index = block.gate(rows)
            made: torch.Tensor = block.experts.forward(rows, index, weights)
            return made.view(states.shape)

        block.forward = forward
    with offload(model, FAR, accelerator=accelerator, session=session) as done:
        poison(done)
        assert torch.equal(answer(model, 1), stock)


def test_empty_batch_copies_no_expert(session: Session, accelerator: str) -> None:
    model = make("mixtral")
    with offload(model, FAR, accelerator=accelerator, session=session) as done, torch.no_grad():
        poison(done)
        assert done.streamed is not None
        layer = model.model.layers[0]
        at = [stage.module for stage in done.streamed._stages].index(layer)
        width = model.config.hidden_size
        done.streamed.begin(at, 0)
        none = torch.empty(0, 2, dtype=torch.int64)
        assert layer.mlp.experts(torch.empty(0, width), none, none.float()).shape == (0, width)
        done.streamed.end(at)
        assert done.streamed.expert_copied_bytes == 0
