"""No operator sees tensors of two devices where a cache lies on an accelerator in part."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from cxl_offload.integrations.transformers import by_kernel, streamed_weights
from cxl_offload.integrations.transformers.accelerator_kv import AcceleratorKv
from cxl_offload.integrations.transformers.asked_experts import StackedExperts
from cxl_offload.integrations.transformers.attention import BlockAttention, take_part
from cxl_offload.integrations.transformers.attention import registered_name as registered
from cxl_offload.integrations.transformers.beam_rows import gather_rows
from cxl_offload.integrations.transformers.beside_layers import take_beside_layers
from cxl_offload.integrations.transformers.cache import put_in_tiers, reserve
from cxl_offload.integrations.transformers.on_accelerator import WeightHomes, compute_on
from cxl_offload.integrations.transformers.parted_states import PartedStates
from cxl_offload.integrations.transformers.room import KvMemory
from cxl_offload.integrations.transformers.row_parts import take_layers
from cxl_offload.integrations.transformers.streamed_states import StateStream
from cxl_offload.integrations.transformers.weights import store_for
from cxl_offload.memory import Bind, Session
from cxl_offload.ops.attention import Partial

from .models import FAMILIES, ONLY_EAGER
from .test_weight_homes import AWAY, POLICIES, NoCopies, _in_bfloat16, _with_fake_tensors

KINDS = {"attention", "mlp", "experts", "norm", "embedding", "head", "other"}


class HostSource:
    """Fake tensors of the host in place of memory, which fake tensors cannot be written to."""

    def empty(self, shape: Any, dtype: torch.dtype, policy: Any, *, pin: bool) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def bytes_per_node(self, address: int, nbytes: int) -> dict[int, int]:
        return {2: nbytes}


def _partial(q: torch.Tensor, k: Any, v: Any, **told: Any) -> Partial:
    """The kernel's shapes; it reads host memory only."""
    given = [each for each in told.values() if isinstance(each, torch.Tensor)]
    for each in (q, k, v, *given):
        assert each.device.type == "cpu"
    attended, bias = told["mask"], told["bias"]
    for each in (attended, bias):
        assert each is None or each.shape[-1] == k.shape[2]
    return Partial(torch.empty_like(q, dtype=torch.float32), q.new_empty(q.shape[:-1]).float())


def _decode(model: Any, cache: DynamicCache, seen: int, count: int) -> None:
    """Some tokens more, after so many."""
    mask = torch.ones(2, seen + count, dtype=torch.long)
    ids = torch.ones(2, count, dtype=torch.long)
    made = model(input_ids=ids, attention_mask=mask, past_key_values=cache)
    assert made.logits.device == AWAY


def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    def show(weight: Any, data: torch.Tensor) -> None:
        weight.fake_device = data.device  # there are no bytes to show

    monkeypatch.setattr(streamed_weights, "show", show)
    monkeypatch.setattr(by_kernel, "decode_attention_partial", _partial)
    # Routers without bytes choose nothing.
    monkeypatch.setattr(StackedExperts, "numbers", lambda self, args, kwargs: self.all)


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("family", FAMILIES)
def test_both_parts_are_read_where_they_are(
    family: str, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of no bytes refuse to be computed with where one is on the GPU and one is not."""
    _fakes(monkeypatch)
    store = store_for({"kv": Bind((2,))}, session)
    store.source = HostSource()
    memory = KvMemory(store, accelerator=AcceleratorKv(AWAY, 0.1))
    block = BlockAttention()
    with _in_bfloat16(), _with_fake_tensors(), torch.no_grad():
        model = FAMILIES[family]().eval()
        own = "eager" if family in ONLY_EAGER else "sdpa"
        model.set_attn_implementation(registered(own))
        with contextlib.ExitStack() as stack:
            compute_on(model, WeightHomes.of(model, KINDS), NoCopies(), stack)
            take_part(model, block)
            stack.callback(take_part, model, None)
            cache = DynamicCache(config=model.config)
            put_in_tiers(cache, memory, 40)
            _decode(model, cache, 0, 7)
            for layer in cache.layers:
                assert isinstance(layer.keys, PartedStates)
                assert layer.keys.head.device == layer.keys.device == AWAY
                assert layer.keys.tail.device.type == "cpu"
            _decode(model, cache, 7, 1)
            _decode(model, cache, 8, 3)
            cache.crop(-2)
            reserve(cache, 90)  # the accelerator takes more of what the tier has
            _decode(model, cache, 9, 1)
            _decode(model, cache, 10, 40)  # too many for the kernel
    layers = model.config.num_hidden_layers
    assert block.calls.joined == 3 * layers, block.calls
    assert block.calls.several == layers
    assert block.calls.prompt == 2 * layers
    assert not block.calls.own


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("kinds", POLICIES, ids=["all", "layers", "embedding-and-norm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_in_parts_are_copied_from_the_tier_and_back(
    family: str, kinds: set[str], session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states of both rows lie on the host, and each layer computes with one on the GPU."""
    _fakes(monkeypatch)
    store = store_for({"kv": Bind((2,)), "activations": Bind((1,))}, session)
    store.source = HostSource()
    memory = KvMemory(store, accelerator=AcceleratorKv(AWAY, 0.1))
    block = BlockAttention()
    with _in_bfloat16(), _with_fake_tensors(), torch.no_grad():
        model = FAMILIES[family]().eval()
        own = "eager" if family in ONLY_EAGER else "sdpa"
        model.set_attn_implementation(registered(own))
        homes = WeightHomes.of(model, kinds)
        with contextlib.ExitStack() as stack:
            states = StateStream(NoCopies(), store, 1, homes.looked_up)
            compute_on(model, homes, NoCopies(), stack, states)
            take_layers(model, 1, memory, stack, states)
            take_beside_layers(model, states, stack)
            take_part(model, block)
            stack.callback(take_part, model, None)
            cache = DynamicCache(config=model.config)
            put_in_tiers(cache, memory, 40)
            _decode(model, cache, 0, 7)
            _decode(model, cache, 7, 1)
            _decode(model, cache, 8, 3)
    layers = model.config.num_hidden_layers
    assert block.calls.joined == 2 * 2 * layers, block.calls
    token = 2 * 64 * 2
    assert states.copied_out_bytes >= 11 * layers * token


def test_beams_are_ordered_on_the_device_of_their_states() -> None:
    """Without bytes; the control is what torch says of an index that is elsewhere."""
    rows, states = torch.tensor([1, 0, 2, 2]), torch.empty(4, 2, 3, 4, device=AWAY)
    gather_rows(states, rows)
    with pytest.raises(RuntimeError, match="same device"):
        states[:, 0].index_copy_(0, rows, states[:, 1])


def test_states_that_are_joined_on_the_wrong_device_are_found_out() -> None:
    """The control of the test above."""
    with _with_fake_tensors():
        head, tail = torch.empty(1, 2, 3, 4, device=AWAY), torch.empty(1, 2, 5, 4)
        assert (PartedStates(head, tail, AWAY) * head[:, :, :1]).device == AWAY
        with pytest.raises(RuntimeError, match="same device"):
            PartedStates(head, tail, torch.device("cpu")) * head[:, :, :1]
        with pytest.raises(RuntimeError, match="same device"):
            torch.cat([head, tail], dim=2)
