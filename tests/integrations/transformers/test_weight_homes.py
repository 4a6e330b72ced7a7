"""Which weights stream, lie on the accelerator or are looked up, and that no operator sees both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import streamed_weights
from cxl_offload.integrations.transformers.asked_experts import StackedExperts
from cxl_offload.integrations.transformers.compute_device import host_policies
from cxl_offload.integrations.transformers.on_accelerator import (
    WeightHomes,
    check_streamable,
    compute_on,
)

from .models import FAMILIES, make

CUDA = torch.device("cuda", 0)


def test_stages_are_layers_then_norm_and_head_and_embeddings_are_looked_up() -> None:
    model = make("llama")
    homes = WeightHomes.of(model, {"attention", "mlp", "norm", "head", "embedding"})
    names = [stage.name for stage in homes.stages]
    assert names == ["lm_head", "model.layers.0", "model.layers.1", "model.norm"] or names == [
        "model.layers.0",
        "model.layers.1",
        "model.norm",
        "lm_head",
    ]
    assert homes.looked_up == (model.model.embed_tokens,)
    assert [each.shape for each in homes.resident] == [
        each.shape for each in model.model.rotary_emb.buffers()
    ]


def test_kinds_that_the_host_does_not_have_are_resident() -> None:
    model = make("llama")
    homes = WeightHomes.of(model, {"attention", "mlp"})
    assert [stage.name for stage in homes.stages] == ["model.layers.0", "model.layers.1"]
    held = {
        name
        for name, weight in model.named_parameters()
        if any(weight is r for r in homes.resident)
    }
    assert held == {
        name
        for name, _ in model.named_parameters()
        if "norm" in name or "embed" in name or "head" in name
    }


AWAY = torch.device("meta")
"""Stands for the GPU: a torch without CUDA has no operators, not even for fake tensors, there."""


@contextlib.contextmanager
def _in_bfloat16() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # the one that experts are computed in everywhere
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _with_fake_tensors() -> Iterator[None]:
    with (
        functorch_config.patch(fake_tensor_allow_meta=True),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


class Arrived:
    """A copy that there is nothing to wait for of."""

    def wait(self) -> None:
        pass

    def query(self) -> bool:
        return True


class NoCopies:
    """Copies between tensors without bytes."""

    device = AWAY

    def stream(self) -> int:
        return 0

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        assert target.device == AWAY
        assert source.device.type == "cpu"
        return Arrived()

    def copy_back(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        return self.copy(source, target, after)

    def behind(self, handle: Any) -> int:
        return 0

    def finish(self, handles: Any) -> None:
        pass

    def wait_for(self, handle: Any) -> None:
        pass

    def close(self) -> None:
        pass


POLICIES = [
    {"attention", "mlp", "experts", "norm", "embedding", "head", "other"},
    {"attention", "mlp", "experts"},
    {"embedding", "norm"},
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kinds", POLICIES, ids=["all", "layers", "embedding-and-norm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_operator_sees_two_devices(
    family: str, kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of no bytes refuse to be computed with where one is on the GPU and one is not."""

    def show(weight: Any, data: torch.Tensor) -> None:
        weight.fake_device = data.device  # there are no bytes to show

    monkeypatch.setattr(streamed_weights, "show", show)
    # Routers without bytes choose nothing.
    monkeypatch.setattr(StackedExperts, "numbers", lambda self, args, kwargs: self.all)
    with _in_bfloat16(), _with_fake_tensors(), torch.no_grad():
        model = FAMILIES[family]().eval()
        homes = WeightHomes.of(model, kinds)
        with contextlib.ExitStack() as stack:
            compute_on(model, homes, NoCopies(), stack)
            for weight in homes.resident:
                assert weight.device == AWAY
            ids = torch.ones(2, 5, dtype=torch.long)
            cache = DynamicCache(config=model.config)
            mask = torch.ones(2, 5, dtype=torch.long)
            made = model(input_ids=ids, attention_mask=mask, past_key_values=cache)
            assert made.logits.device == AWAY
            mask = torch.ones(2, 6, dtype=torch.long)
            made = model(input_ids=ids[:, :1], attention_mask=mask, past_key_values=cache)
            assert made.logits.device == AWAY
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            assert tensor.device.type == "cpu", name


def test_operator_that_sees_two_devices_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: one weight that nobody takes along."""
    monkeypatch.setattr(streamed_weights, "show", lambda weight, data: None)
    with _in_bfloat16(), _with_fake_tensors(), torch.no_grad():
        model = FAMILIES["llama"]().eval()
        homes = WeightHomes.of(model, {"attention", "mlp"})
        with contextlib.ExitStack() as stack:
            compute_on(model, homes, NoCopies(), stack)
            with pytest.raises(RuntimeError, match="same device"):
                model(input_ids=torch.ones(2, 5, dtype=torch.long))


def test_layers_that_are_larger_than_the_accelerator_are_refused() -> None:
    model = make("llama")
    homes = WeightHomes.of(model, {"attention", "mlp", "norm", "head", "embedding"})
    needed = homes.needed_bytes(CUDA)
    assert needed == 2 * homes.largest_stage_bytes + sum(each.nbytes for each in homes.resident)
    kinds = {"attention", "mlp", "norm", "head", "embedding"}
    check_streamable(model, kinds, CUDA, needed)
    with pytest.raises(ConfigError, match=r"needs .* on cuda:0 \(.*, the largest of what is"):
        check_streamable(model, kinds, CUDA, needed - 1)


def test_policy_of_the_accelerator_leaves_the_others_on_the_host() -> None:
    found = host_policies({"weights": "cxl", "norm": "gpu", "kv": "ldram"})
    assert "norm" not in found
    assert found["mlp"] == found["head"] == "cxl"
    assert found["kv"] == "ldram"
    with pytest.raises(ConfigError, match="experts of a layer go to the accelerator together"):
        host_policies({"experts": "cxl", "experts:0-3": "gpu"})
