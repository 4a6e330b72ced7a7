"""Threads that share a model whose weights are streamed to an accelerator."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from cxl_offload import _C
from cxl_offload.integrations.transformers import offload
from cxl_offload.memory import Session

from .conftest import machine
from .fake_accelerator import pinning_session
from .models import generate, make

FAR = {"weights": "bind:2", "kv": "bind:0"}
THREADS = 3


@pytest.fixture
def session(driver: _C.FakeDriver, accelerator: str) -> Iterator[Session]:
    with pinning_session(machine(), driver) as session:
        yield session


@pytest.mark.parametrize("share", [None, 0.5])
def test_passes_of_threads_over_the_weights_take_turns(
    share: float | None, session: Session
) -> None:
    """Every pass goes on while the others want to begin: they meet at its first layer."""
    model = make("llama")
    expected = generate(model)
    made: list[torch.Tensor] = []
    inside, most = 0, 0
    begin = threading.Barrier(THREADS)

    def enter(*_: object) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)

    def leave(*_: object) -> None:
        nonlocal inside
        inside -= 1

    def work() -> None:
        begin.wait()
        made.append(generate(model))

    with offload(model, FAR, accelerator="cuda", accelerator_kv=share, session=session):
        layers = model.model.layers
        hooks = [
            layers[0].register_forward_pre_hook(enter),
            layers[-1].register_forward_hook(leave),
        ]
        threads = [threading.Thread(target=work) for _ in range(THREADS)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        for hook in hooks:
            hook.remove()
    assert most == 1
    assert len(made) == THREADS
    assert all(torch.equal(tokens, expected) for tokens in made)
    assert "forward" not in vars(model)


def test_pass_that_is_interrupted_lets_the_next_thread_begin(session: Session) -> None:
    model = make("llama")
    expected = generate(model)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with offload(model, FAR, accelerator="cuda", session=session):
        hook = model.model.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            generate(model)
        hook.remove()
        made: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: made.append(generate(model)), daemon=True)
        thread.start()
        thread.join(600)
        assert made
        assert torch.equal(made[0], expected)
