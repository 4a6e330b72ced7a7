"""Ctrl-C while a block ends: the model is as before, and the interrupt comes after that."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch

from cxl_offload.integrations.transformers import offload
from cxl_offload.integrations.undisturbed import undisturbed
from cxl_offload.memory import Session

from .models import generate, make

PLACES = {"weights": "bind:2", "kv": "bind:2"}


@pytest.fixture(autouse=True)
def interrupts_python() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted_at(count: int) -> Any:
    """A tracer that sends SIGINT when so many calls of functions have begun."""
    left = count

    def trace(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGINT)

    return trace


@pytest.mark.parametrize("options", [{}, {"rows_at_once": 2, "linear_rows": 8}])
def test_interrupt_at_the_end_of_a_block_leaves_the_model_as_before(
    options: dict[str, Any], session: Session
) -> None:
    """Anywhere in it, from its second call of a function on."""
    model = make("llama")
    expected = generate(model)
    attention = model.config._attn_implementation
    came = 0
    for count in range(2, 600, 13):
        block = offload(model, PLACES, session=session, **options)
        block.__enter__()
        sys.settrace(interrupted_at(count))
        try:
            block.__exit__(None, None, None)
        except KeyboardInterrupt:
            came += 1
        finally:
            sys.settrace(None)
        assert model.config._attn_implementation == attention
        assert not model._forward_pre_hooks
        assert "forward" not in vars(model.model.layers[0])
        gc.collect()
        assert session.stats().asked_bytes.current == 0
    assert came > 5
    assert torch.equal(generate(model), expected)


def test_interrupt_while_a_block_begins_leaves_the_attention_as_before(session: Session) -> None:
    model = make("llama")
    attention, stock = model.config._attn_implementation, model.set_attn_implementation

    def interrupted(name: Any) -> None:
        stock(name)
        vars(model).pop("set_attn_implementation", None)
        raise KeyboardInterrupt

    vars(model)["set_attn_implementation"] = interrupted
    with pytest.raises(KeyboardInterrupt), offload(model, PLACES, session=session):
        pytest.fail("the block began")
    assert model.config._attn_implementation == attention
    with offload(model, PLACES, session=session):
        generate(model)


def test_other_threads_and_signals_without_a_handler_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def look() -> None:
        with undisturbed():
            seen.append(signal.getsignal(signal.SIGINT))

    other = threading.Thread(target=look)
    other.start()
    other.join()
    assert seen == [before[0]]
    with undisturbed():
        assert signal.getsignal(signal.SIGINT) is not before[0]
        assert signal.getsignal(signal.SIGTERM) is before[1]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
