"""Memory that fails while a model generates: the same tokens, or one error with a name."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from cxl_offload.errors import MemoryLostError
from cxl_offload.integrations.transformers import load, offload
from cxl_offload.memory import Session, lost_memory, survive_memory_errors
from tests.memory.failures import lose

from .models import make, prompts

PLACES = {"weights": "bind:2", "kv": "bind:2"}


@pytest.fixture(autouse=True)
def surviving() -> Iterator[None]:
    with survive_memory_errors():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make("llama").save_pretrained(tmp_path)
    return tmp_path


class _Fails(LogitsProcessor):  # type: ignore[misc]
    """At one token, once: the page under an address that is asked for then."""

    def __init__(self, at: int, where: Any) -> None:
        self.left, self.where, self.failed = at, where, 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            self.failed += 1
            lose(self.where())
        return scores


def generated(model: PreTrainedModel, *processors: LogitsProcessor, **options: Any) -> torch.Tensor:
    made: torch.Tensor = model.generate(
        **prompts(2),
        max_new_tokens=8,
        logits_processor=LogitsProcessorList(processors),
        **{"do_sample": False, **options},
    )
    return made


@pytest.mark.parametrize("seed", range(6))
def test_lost_weights_are_read_again_and_the_tokens_are_the_same(
    folder: Path, session: Session, seed: int
) -> None:
    generator = random.Random(seed)
    model = load(folder, PLACES, session=session)
    names = [name for name, weight in model.named_parameters() if weight.nbytes > 8192]
    weight = model.get_parameter(generator.choice(names))
    at = generator.randrange(weight.nbytes)
    with offload(model, PLACES, session=session):
        right = generated(model)
        before = weight.detach().clone()
        fails = _Fails(generator.randrange(1, 8), weight[...].view(-1)[at // 4].data_ptr)
        assert torch.equal(generated(model, fails), right)
        assert fails.failed == 1
        assert torch.equal(weight, before)
    assert lost_memory() == ()
    del model, weight


def test_sampled_tokens_are_the_same_too(folder: Path, session: Session) -> None:
    model = load(folder, PLACES, session=session)
    address = model.get_parameter("lm_head.weight").data_ptr()
    with offload(model, PLACES, session=session):
        torch.manual_seed(5)
        right = generated(model, do_sample=True)
        torch.manual_seed(5)
        assert torch.equal(generated(model, _Fails(4, lambda: address), do_sample=True), right)
    del model


def test_lost_keys_and_values_are_computed_again(session: Session) -> None:
    model = make("llama")
    with offload(model, {"kv": "bind:2"}, session=session) as done:
        right = generated(model)

        def keys() -> int:
            return next(address for kind, address, _ in done.store._alive.values() if kind == "kv")

        fails = _Fails(4, keys)
        assert torch.equal(generated(model, fails), right)
        assert fails.failed == 1
    assert lost_memory() == ()
    del model


@pytest.mark.parametrize("interrupt", [True, False])
def test_keys_that_are_lost_in_a_pass_are_computed_again(session: Session, interrupt: bool) -> None:
    """Where they are read most: the frames of the pass, and of its hooks, hold the cache."""
    model = make("llama")
    left = 0

    def fail(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            kinds = done.store._alive.values()
            lose(next(address for kind, address, _ in kinds if kind == "kv"))

    model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with survive_memory_errors(interrupt=interrupt):
        with offload(model, {"kv": "bind:2"}, session=session) as done:
            right = generated(model)
            for left in (1, 2, 5):
                assert torch.equal(generated(model), right)
                assert left < 1
        assert lost_memory() == ()
    del model


def test_weights_that_no_file_has_are_one_error(session: Session) -> None:
    model = make("llama")
    with offload(model, PLACES, session=session):
        weight = model.get_parameter("lm_head.weight")
        with pytest.raises(
            MemoryLostError,
            match=r"a tensor of head \(\d+ KiB\) on node 2 are lost; write them anew",
        ):
            generated(model, _Fails(2, weight.data_ptr))


def test_weights_that_were_trained_since_are_one_error_that_names_them(
    folder: Path, session: Session
) -> None:
    model = load(folder, PLACES, session=session)
    weight = model.get_parameter("lm_head.weight")
    with torch.no_grad():
        weight[-1] += 1
    with offload(model, PLACES, session=session), pytest.raises(MemoryLostError) as raised:
        generated(model, _Fails(2, weight.data_ptr))
    assert "of weight lm_head.weight on node 2" in str(raised.value)
    assert weight.flatten()[:1024].isnan().all()
    del model, weight


def test_cache_of_the_caller_is_one_error(folder: Path, session: Session) -> None:
    model = load(folder, PLACES, session=session)
    address = model.get_parameter("lm_head.weight").data_ptr()
    with offload(model, PLACES, session=session):
        cache = model(**prompts(2)).past_key_values
        with pytest.raises(MemoryLostError, match="written anew, so do this once more"):
            generated(model, _Fails(2, lambda: address), past_key_values=cache)
    del model, cache
