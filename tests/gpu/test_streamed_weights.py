"""Weights streamed from pinned tiers to a real GPU while a decoder of transformers computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cxl_offload.errors import ConfigError
from cxl_offload.memory import Session

from .slow_work import keep_busy

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from cxl_offload.integrations.transformers import offload

pytestmark = pytest.mark.gpu

LAYERS = 6
BUSY_CYCLES = 20_000_000


def make() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        pad_token_id=1,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
    model.generation_config.eos_token_id = None
    return model


def generate(model: LlamaForCausalLM, device: str = "cpu") -> torch.Tensor:
    ids = torch.randint(3, 512, (4, 20), generator=torch.Generator().manual_seed(0)).to(device)
    made = model.generate(
        ids, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids)
    )
    return made.cpu()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def stock() -> torch.Tensor:
    """Tokens of the same weights, all of them on the GPU."""
    tokens = generate(make().cuda(), "cuda")
    torch.cuda.empty_cache()
    return tokens


def near(session: Session) -> str:
    return f"bind:{session.kernel.local_node}"


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("resident", [(), ("norm", "head"), ("embedding", "head", "norm")])
def test_tokens_are_those_of_weights_on_the_gpu(
    resident: tuple[str, ...], busy: bool, session: Session, stock: torch.Tensor
) -> None:
    """``busy``: layers run long after they were queued, so that copies are far ahead of them."""
    model = make()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    policies: dict[str, Any] = {"weights": near(session), **dict.fromkeys(resident, "gpu")}
    with offload(model, policies, accelerator="cuda", session=session) as done:
        if busy:
            for layer in model.model.layers:
                layer.register_forward_pre_hook(
                    lambda *_: keep_busy(torch.cuda.current_stream(), BUSY_CYCLES)
                )
        tokens = generate(model, str(model.device))
        assert done.streamed is not None
        assert done.streamed.copied_bytes > 0
    assert torch.equal(tokens, stock)
    for name, weight in model.state_dict().items():
        assert weight.device.type == "cpu", name
        assert torch.equal(weight, before[name]), name


def test_kv_on_the_host_has_the_same_tokens(session: Session, stock: torch.Tensor) -> None:
    model = make()
    policies = {"weights": near(session), "kv": near(session)}
    with offload(model, policies, accelerator="cuda:0", session=session) as done:
        tokens = generate(model)
        assert done.calls.kernel > 0
    assert torch.equal(tokens, stock)


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_kv_in_two_places_has_the_same_tokens(
    share: float, busy: bool, session: Session, stock: torch.Tensor
) -> None:
    """The GPU attends to its part while the kernel reads the tier's; ``busy``: long after."""
    model = make()
    policies = {"weights": near(session), "kv": near(session)}
    with offload(
        model, policies, accelerator="cuda", accelerator_kv=share, session=session
    ) as done:
        if busy:
            for layer in model.model.layers:
                layer.register_forward_pre_hook(
                    lambda *_: keep_busy(torch.cuda.current_stream(), BUSY_CYCLES)
                )
        tokens = generate(model)
        calls = done.calls
        assert (calls.joined > 0) is (share < 1)
        assert calls.kernel + calls.accelerator == 11 * LAYERS
        assert done.accelerator_kv_bytes > 0
    assert torch.equal(tokens, stock)


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("resident", [(), ("embedding", "head", "norm")])
def test_hidden_states_in_a_tier_have_the_same_tokens(
    resident: tuple[str, ...], busy: bool, session: Session, stock: torch.Tensor
) -> None:
    """Rows go to each layer and back; ``busy``: layers run long after they were queued."""
    model = make()
    policies = dict.fromkeys(("weights", "kv", "activations"), near(session))
    policies |= dict.fromkeys(resident, "gpu")
    with offload(model, policies, rows_at_once=1, accelerator="cuda", session=session) as done:
        if busy:
            for layer in model.model.layers:
                layer.register_forward_pre_hook(
                    lambda *_: keep_busy(torch.cuda.current_stream(), BUSY_CYCLES)
                )
        tokens = generate(model)
        assert done.streamed_states is not None
        assert done.streamed_states.copied_out_bytes > 0
        assert done.store.use()[("activations", "host")].live_bytes == 0
    assert torch.equal(tokens, stock)


def test_beams_and_a_kept_cache_are_in_two_places_on_the_gpu(session: Session) -> None:
    """Orders the GPU's part, moves positions up when it grows, and gives its memory back."""
    ids = torch.randint(3, 512, (2, 20), generator=torch.Generator().manual_seed(0))
    more = torch.randint(3, 512, (2, 90), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 12, "do_sample": False}

    def both_turns(model: LlamaForCausalLM) -> list[torch.Tensor]:
        device = model.device
        beams = model.generate(ids.to(device), num_beams=3, **options)
        first = model.generate(ids.to(device), return_dict_in_generate=True, **options)
        turn = torch.cat([first.sequences, more.to(device)], dim=1)
        again = model.generate(turn, past_key_values=first.past_key_values, **options)
        return [beams.cpu(), again.cpu()]

    expected = both_turns(make().cuda())
    model, policies = make(), {"weights": near(session), "kv": near(session)}
    torch.cuda.synchronize()
    with offload(model, policies, accelerator="cuda", accelerator_kv=0.4, session=session) as done:
        found = both_turns(model)
        assert done.calls.joined > 0
        there = done._kv.accelerator
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    assert there is not None
    assert there.use.live_bytes == 0


def test_gpu_holds_two_layers_and_not_all(session: Session) -> None:
    model = make()
    whole = sum(weight.nbytes for weight in model.model.layers.parameters())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with offload(model, {"weights": near(session)}, accelerator="cuda", session=session):
        held = torch.cuda.memory_allocated() - before
        assert whole / LAYERS < held < whole * 2.5 / LAYERS
        generate(model)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < whole / LAYERS


def test_damaged_weights_change_the_tokens(session: Session, stock: torch.Tensor) -> None:
    model = make()
    with offload(model, {"weights": near(session)}, accelerator="cuda", session=session):
        with torch.no_grad():
            model.model.layers[2].mlp.down_proj.weight.mul_(-1)
        assert not torch.equal(generate(model), stock)


def test_device_of_no_such_number_is_refused(session: Session) -> None:
    model = make()
    with pytest.raises(ConfigError, match="accelerator cuda:99: torch finds"):
        offload(model, {"weights": near(session)}, accelerator="cuda:99", session=session)
