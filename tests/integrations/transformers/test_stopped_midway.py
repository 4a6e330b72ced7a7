"""An exception in the middle of a call: memory is returned, and the next block is right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from cxl_offload.integrations.transformers import offload
from cxl_offload.memory import Session

from .models import generate, make, prompts

CXL = {"kv": "bind:2"}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "fixed cache": {"cache_implementation": "static"},
    "beams in a fixed cache": {"num_beams": 3, "cache_implementation": "static"},
    "drawn": {"do_sample": True, "top_p": 0.95},
}
KEPT_AS: dict[str, Any] = {
    "as they are": None,
    "fp8 e4m3": torch.float8_e4m3fn,
    "fp8 e5m2": torch.float8_e5m2,
    "int4": "int4",
}


class FailsAtToken(LogitsProcessor):  # type: ignore[misc]
    """Raises where a token is chosen, and says what the session holds then."""

    def __init__(self, tokens: int, session: Session) -> None:
        self.left, self._session, self.held = tokens, session, 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            self.held = self._session.stats().asked_bytes.current
            raise RuntimeError("stop here")
        return scores


def drawn_alike(model: Any, **options: Any) -> torch.Tensor:
    torch.manual_seed(7)
    return generate(model, **options)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("kept_as", KEPT_AS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_memory_is_returned_and_the_second_block_is_right(
    family: str, way: str, kept_as: str, session: Session
) -> None:
    """While the exception is still in hand, whose frames hold the cache."""
    model, options = make(family), WAYS[way]
    model.set_attn_implementation("sdpa")
    kept = {"kv_dtype": KEPT_AS[kept_as], "session": session}
    if kept_as == "as they are":
        expected = drawn_alike(model, **options)
    else:
        with offload(model, CXL, **kept):
            expected = drawn_alike(model, **options)
    failing = FailsAtToken(4, session)
    with pytest.raises(RuntimeError, match="stop here") as caught, offload(model, CXL, **kept):
        generate(model, **options, logits_processor=LogitsProcessorList([failing]))
    assert failing.held > 0
    assert session.stats().asked_bytes.current == 0
    session.trim()  # the pool's free pages
    assert session.stats().nodes[2].current_bytes == 0
    assert caught.value.__traceback__ is not None
    with offload(model, CXL, **kept) as done:
        tokens = drawn_alike(model, **options)
    assert torch.equal(tokens, expected)
    assert done.calls.kernel == 9 * model.config.num_hidden_layers


def test_assistant_and_model_return_their_memory(session: Session) -> None:
    model = make("llama")
    assistant = copy.deepcopy(model)
    one = {name: rows[2:3] for name, rows in prompts().items()}
    stock = generate(model, "sdpa", **one)
    failing = FailsAtToken(4, session)
    with (
        pytest.raises(RuntimeError, match="stop here"),
        offload(model, CXL, session=session),
        offload(assistant, {"kv": "bind:1"}, session=session),
    ):
        generate(
            model, **one, assistant_model=assistant, logits_processor=LogitsProcessorList([failing])
        )
    assert failing.held > 0
    assert session.stats().asked_bytes.current == 0
    with (
        offload(model, CXL, session=session),
        offload(assistant, {"kv": "bind:1"}, session=session),
    ):
        tokens = generate(model, **one, assistant_model=assistant)
    assert torch.equal(tokens, stock)
