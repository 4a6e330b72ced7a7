"""Root-mean-square norms under ``offload``: whose are taken, and what the model says then."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from cxl_offload import _C
from cxl_offload.integrations.transformers import offload
from cxl_offload.memory import Session

from .models import generate, make

CXL = {"kv": "bind:2"}
OURS = {"llama": 5, "qwen3": 9, "mixtral": 5, "gemma3": 0, "gpt-oss": 0, "opt": 0}
"""Norms of two layers whose formula is LLaMA's; those of queries and keys are two more a layer."""


@pytest.fixture(name="calls")
def _calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the kernel was called with."""
    calls: list[Any] = []
    kernel = _C.run_plain_norm

    def counted(*given: Any) -> None:
        calls.append(given)
        kernel(*given)

    monkeypatch.setattr(_C, "run_plain_norm", counted)
    return calls


def _changed(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if "forward" in vars(module)]


def _norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if "Norm" in type(module).__name__]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("linear_rows", [4, "fastest"])
@pytest.mark.parametrize("family", OURS)
def test_norms_are_taken_by_what_they_compute(
    family: str, linear_rows: Any, dtype: torch.dtype, session: Session, calls: list[Any]
) -> None:
    model = make(family, dtype)
    stock = generate(model, "eager" if family == "gpt-oss" else "sdpa")
    with offload(model, CXL, linear_rows=linear_rows, session=session):
        taken = [norm for norm in _norms(model) if "forward" in vars(norm)]
        assert len(taken) == OURS[family]
        tokens = generate(model)
    assert len(calls) == OURS[family] * 10, "the prompt and 9 tokens"
    if dtype is torch.float32:
        assert torch.equal(tokens, stock)
    assert not _changed(model)
    with offload(model, CXL, session=session):
        assert not _changed(model)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # of torch's own tangents
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
def test_norms_are_torchs_where_the_kernel_cannot_say_the_same(
    kind: type[nn.Module], session: Session, calls: list[Any]
) -> None:
    model = make("llama")
    norm = model.model.norm = kind(64)
    x, weight = torch.randn(2, 3, 64), torch.randn(64)
    with torch.no_grad():
        norm.weight.copy_(weight)
        stock = norm(x)
    seen: list[torch.Tensor] = []
    norm.register_forward_hook(lambda _module, _given, result: seen.append(result))
    with offload(model, CXL, linear_rows=4, session=session):
        with torch.no_grad():
            assert torch.allclose(norm(x), stock, rtol=1e-6)
            assert len(calls) == len(seen) == 1
            assert torch.equal(norm(x.double()), kind.forward(norm, x.double()))
            assert torch.equal(norm(x.bfloat16()), kind.forward(norm, x.bfloat16()))
            assert torch.equal(
                torch.compile(norm.forward, backend="eager", fullgraph=True)(x), stock
            )
            assert torch.equal(make_fx(lambda rows: norm.forward(rows))(x)(x), stock)
            with forward_ad.dual_level():
                moving = forward_ad.make_dual(x, torch.ones_like(x))
                assert forward_ad.unpack_dual(norm.forward(moving)).tangent is not None
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert torch.equal(norm(x), stock)
        norm(x).sum().backward()
        assert norm.weight.grad is not None
    assert len(calls) == 1


def test_norms_that_somebody_changed_are_left_alone(session: Session, calls: list[Any]) -> None:
    class Doubled(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(hidden_states)

    model = make("llama")
    model.model.norm = Doubled(64)
    model.model.layers[0].input_layernorm.forward = Doubled(64).forward
    model.model.layers[1].input_layernorm = Gemma3RMSNorm(64)
    with offload(model, CXL, linear_rows=4, session=session), torch.no_grad():
        assert "forward" not in vars(model.model.norm)
        assert "forward" not in vars(model.model.layers[1].input_layernorm)
        model(torch.tensor([[5, 6]]))
    assert len(calls) == 2
    assert _changed(model) == [model.model.layers[0].input_layernorm]


def test_copies_of_a_model_in_a_block_compute_by_themselves(session: Session) -> None:
    model = make("llama")
    ids = torch.tensor([[5, 6, 7]])
    with offload(model, {"weights": "bind:1"}, linear_rows=4, session=session), torch.no_grad():
        norm = copy.deepcopy(model.model.norm)
        norm.weight.mul_(2)
        x = torch.randn(1, 3, 64)
        assert torch.equal(norm(x), 2 * model.model.norm(x))
        read = pickle.loads(pickle.dumps(model.model.norm))
        assert torch.allclose(read(x), model.model.norm(x), rtol=1e-6)
        expected = model(ids).logits
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, expected, atol=1e-5)


class _Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch
        return 2 * super().forward(input)


def test_forward_that_somebody_sets_in_the_block_holds_in_it_and_stays(session: Session) -> None:
    model = make("llama")
    norm, layer = model.model.norm, model.lm_head
    with offload(model, CXL, linear_rows=4, session=session):
        for each in (norm, layer):
            each.forward = lambda x: torch.zeros_like(x)  # type: ignore[method-assign]
    x = torch.ones(1, norm.weight.shape[0])
    with torch.no_grad():
        assert not norm(x).any()
        assert not layer(x).any()
    del norm.forward, layer.forward
    assert not _changed(model)


def test_what_wraps_a_layer_in_the_block_computes_by_torch_after_it(session: Session) -> None:
    """So does a copy of the layer; the kernel adds in another order, and its last bits show it."""
    model = make("llama")
    norm, layer = model.model.norm, model.lm_head
    x = torch.randn(3, norm.weight.shape[0])
    stock = [each(x).detach() for each in (norm, layer)]
    with torch.no_grad(), offload(model, CXL, linear_rows=4, session=session):
        by_kernel = [each(x) for each in (norm, layer)]
        for each in (norm, layer):
            each.forward = functools.partial(each.forward)  # type: ignore[method-assign]
        copied = copy.deepcopy(layer)
    assert not torch.equal(by_kernel[1], stock[1])
    with torch.no_grad():
        assert torch.equal(norm(x), stock[0])
        assert torch.equal(layer(x), stock[1])
        assert torch.equal(copied(x), stock[1])


def test_layer_that_becomes_another_class_in_the_block_computes_as_that(session: Session) -> None:
    model = make("llama")
    layer = model.lm_head
    x = torch.ones(1, layer.in_features)
    with torch.no_grad(), offload(model, CXL, linear_rows=4, session=session):
        once = layer(input=x)  # by torch's name
        layer.__class__ = _Doubled
        assert torch.equal(layer(x), 2 * torch.nn.functional.linear(x, layer.weight))
    assert torch.allclose(once, torch.nn.functional.linear(x, layer.weight), atol=1e-4)
