"""Tokens of a model whose cache lies on an accelerator in part, and in a tier: those of stock."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from cxl_offload import _C
from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import by_kernel, offload
from cxl_offload.integrations.transformers.parted_states import PartedStates
from cxl_offload.memory import Session
from cxl_offload.ops.attention import Partial

from .conftest import machine
from .fake_accelerator import pinning_session
from .models import FAMILIES, ONLY_EAGER, generate, in_double, make, prompts
from .test_tokens import _after, _step_logits, _whole

FAR = {"weights": "bind:2", "kv": "bind:1"}
SHARES = [0, 0.05, 0.5, 1]


@pytest.fixture
def session(driver: _C.FakeDriver) -> Iterator[Session]:
    with pinning_session(machine(), driver) as session:
        yield session


@pytest.fixture
def parted(session: Session, accelerator: str) -> Iterator[Any]:
    """``offload`` with a share of the cache on an accelerator whose memory is the CPU's."""
    opened = []

    def open_block(model: nn.Module, share: float, **options: Any) -> Any:
        made = offload(
            model, FAR, accelerator=accelerator, accelerator_kv=share, session=session, **options
        )
        opened.append(made)
        return made

    yield open_block
    for done in opened:
        there = done._kv.accelerator
        assert there is None or there.use.live_bytes == 0


def own(family: str) -> str:
    return "eager" if family in ONLY_EAGER else "sdpa"


@pytest.mark.sampled(11)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_stock(family: str, share: float, parted: Any) -> None:
    model = make(family)
    stock = generate(model, own(family))
    with parted(model, share) as done:
        assert torch.equal(generate(model), stock)
    calls = done.calls
    assert calls.kernel + calls.accelerator == 9 * model.config.num_hidden_layers
    assert (calls.joined > 0) is (0 < share < 1)
    assert (done.accelerator_kv_bytes > 0) is (share > 0)
    if share == 1:
        assert calls.kernel == 0
    assert not calls.own


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt-oss"])
def test_beams_choose_as_stock(family: str, parted: Any) -> None:
    options = {"num_beams": 3, "num_return_sequences": 2}
    model = make(family)
    stock = generate(model, own(family), **options)
    with parted(model, 0.3) as done:
        assert torch.equal(generate(model, **options), stock)
    assert done.calls.joined > 0


def test_sampling_draws_the_same_tokens(parted: Any) -> None:
    model = make("llama")
    options = {"do_sample": True, "top_p": 0.95, "temperature": 0.8}
    torch.manual_seed(7)
    stock = generate(model, "sdpa", **options)
    torch.manual_seed(7)
    with parted(model, 0.5):
        assert torch.equal(generate(model, **options), stock)


@pytest.mark.parametrize("share", [0.5, 0.75])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt-oss"])
def test_assisted_decoding_takes_candidates_back(family: str, share: float, parted: Any) -> None:
    """Also where the candidates were given to the accelerator: the cut is within them at times."""
    model, assistant = make(family), make(family)
    noise = 0.02 if family == "gpt-oss" else 0.002  # enough for it to be wrong at times
    with torch.no_grad():
        for weight in assistant.parameters():
            weight.add_(noise * torch.randn_like(weight))
    assistant.generation_config.assistant_confidence_threshold = 0  # a tiny model is never sure
    one = {name: rows[2:3] for name, rows in prompts().items()}
    assistant.set_attn_implementation(own(family))
    alone = generate(model, own(family), **one)
    with parted(model, share) as done:
        tokens = generate(model, **one, assistant_model=assistant)
    assert torch.equal(tokens, alone)
    assert done.calls.several > 0
    assert done.calls.joined > 0


@pytest.mark.parametrize("family", ["opt", "mistral", "gemma3"])
def test_prefix_computed_once_serves_several_prompts(family: str, parted: Any) -> None:
    model = make(family)
    ids = prompts()["input_ids"][2:3]
    follow = torch.tensor([[9, 8, 7], [20, 30, 40]])
    stock = [generate(model, "sdpa", **_after(ids, row)) for row in follow]
    with parted(model, 0.12) as done, torch.no_grad():
        prefix = model(ids).past_key_values
        for row, expected in zip(follow, stock, strict=True):
            kept = copy.deepcopy(prefix)
            tokens = generate(model, **_after(ids, row), past_key_values=kept)
            assert torch.equal(tokens, expected)
        del kept, prefix
    assert done.calls.joined > 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss"])
def test_chat_goes_on_with_the_cache_of_the_turn_before(family: str, parted: Any) -> None:
    """The second turn is longer than was expected of the first: both parts grow."""
    model = make(family)
    ids = prompts()["input_ids"][2:4]
    more = torch.randint(3, 200, (2, 90), generator=torch.Generator().manual_seed(5))
    with parted(model, 0.5) as done:
        first = generate(model, **_whole(ids), return_dict_in_generate=True)
        turn = torch.cat([first.sequences, more], dim=1)
        tokens = generate(model, **_whole(turn), past_key_values=first.past_key_values)
        del first
    assert torch.equal(tokens, generate(model, own(family), **_whole(turn)))
    assert done.calls.joined > 0


def test_cache_that_is_cropped_into_the_accelerators_part_goes_on(parted: Any) -> None:
    model = make("llama")
    ids = prompts()["input_ids"][2:4]
    stock = generate(model, "sdpa", **_after(ids[:, :6], torch.tensor([[9, 8], [7, 6]])))
    with parted(model, 0.12), torch.no_grad():
        cache = model(ids).past_key_values
        assert cache.layers[0].keys.head.shape[2] > 6
        cache.crop(6)
        again = _after(ids[:, :6], torch.tensor([[9, 8], [7, 6]]))
        assert torch.equal(generate(model, **again, past_key_values=cache), stock)
        del cache


def test_cache_stays_valid_after_the_block(parted: Any) -> None:
    model = make("qwen2")
    ids = prompts()["input_ids"][2:4]
    more = _after(ids, torch.tensor([5, 6]).expand(2, -1))
    stock = generate(model, "sdpa", **more)
    with parted(model, 0.2), torch.no_grad():
        cache = model(ids).past_key_values
    assert any(isinstance(layer.keys, PartedStates) for layer in cache.layers)
    assert torch.equal(generate(model, **more, past_key_values=cache), stock)
    del cache


@pytest.mark.parametrize(
    "options",
    [{"rows_at_once": 3}, {"kv_dtype": torch.float8_e4m3fn}, {"kv_dtype": "int4"}],
    ids=["rows", "fp8", "int4"],
)
def test_other_options_compute_as_without_a_share(options: dict[str, Any], parted: Any) -> None:
    model = make("llama")
    with parted(model, 0, **options) as done:
        expected, whole = generate(model), done.store.use()["kv", "host"].peak_bytes
    with parted(model, 0.5, **options) as done:
        assert torch.equal(generate(model), expected)
    there = done.accelerator_kv_bytes
    assert there + done.store.use()["kv", "host"].peak_bytes == whole
    assert there == pytest.approx(whole / 2, rel=0.05)


# Controls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["head", "tail"])
@pytest.mark.parametrize("which", ["keys", "values"])
def test_damage_in_either_part_changes_the_tokens(which: str, part: str, parted: Any) -> None:
    model = make("llama")
    ids = prompts()["input_ids"][2:4]
    more = _after(ids, torch.tensor([5, 6]).expand(2, -1))
    stock = generate(model, "sdpa", **more)
    with parted(model, 0.12), torch.no_grad():
        cache = model(ids).past_key_values
        states = getattr(getattr(cache.layers[1], which), part)
        assert states.shape[2] > 5
        states[:, :, :5] *= -1
        tokens = generate(model, **more, past_key_values=cache)
        del cache, states
    assert not torch.equal(tokens, stock)


@pytest.mark.parametrize("fault", ["no weights", "no head", "sinks twice"])
def test_parts_that_are_joined_in_another_way_change_the_tokens(
    fault: str, parted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = by_kernel.combine

    def wrong(parts: list[Partial]) -> Partial:
        if fault == "no weights":
            parts = [Partial(each.out, torch.zeros_like(each.log_sum_exp)) for each in parts]
        elif fault == "no head":
            parts = parts[1:]
        else:
            parts = [*parts, *parts[2:]]
        return real(parts)

    family = "gpt-oss" if fault == "sinks twice" else "llama"
    model = make(family)
    if family == "gpt-oss":
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks.add_(4)
    stock = generate(model, own(family))
    with parted(model, 0.2):
        assert torch.equal(generate(model), stock)
        monkeypatch.setattr(by_kernel, "combine", wrong)
        assert not torch.equal(generate(model), stock)


# How near ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt-oss"])
def test_half_precision_is_as_near_to_double_as_stock(
    family: str, dtype: torch.dtype, parted: Any
) -> None:
    """Logits of single steps over the same tokens, against the formula in double precision."""
    model = make(family, dtype)
    exact = _step_logits(in_double(model))
    stock = (_step_logits(model, own(family)) - exact).abs().mean().item()
    with parted(model, 0.1) as done:
        ours = (_step_logits(model) - exact).abs().mean().item()
    assert done.calls.joined > 0
    assert ours <= 1.2 * stock  # most of it comes from the linear layers


# Failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1])
def test_error_in_the_joining_gives_all_memory_back_and_the_next_call_is_right(
    layer: int, parted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("llama")
    stock = generate(model, "sdpa")
    left = iter(range(2 * 3 + layer))

    def interrupted(*_: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return real(*_)

    real = by_kernel.combine
    with parted(model, 0.3) as done:
        with monkeypatch.context() as patched:
            patched.setattr(by_kernel, "combine", interrupted)
            with pytest.raises(KeyboardInterrupt):
                generate(model)
        assert torch.equal(generate(model), stock)
        assert done._kv.accelerator.use.live_bytes == 0


def test_fixed_cache_is_refused_before_the_model_runs(parted: Any) -> None:
    model = make("llama")
    with parted(model, 0.3) as done:
        with pytest.raises(ConfigError, match="accelerator_kv is for caches that grow"):
            generate(model, cache_implementation="static")
        assert done.calls.prompt == 0


def test_share_without_an_accelerator_is_refused(session: Session) -> None:
    with pytest.raises(ConfigError, match="no accelerator computes"):
        offload(make("llama"), FAR, accelerator_kv=0.5, session=session)
