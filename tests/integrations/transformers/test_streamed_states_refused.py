"""What ends badly, or is refused, with hidden states in a tier beside an accelerator."""

from __future__ import annotations

import copy
import gc
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cxl_offload import _C
from cxl_offload.errors import ConfigError
from cxl_offload.integrations import fit
from cxl_offload.integrations.transformers import offload
from cxl_offload.integrations.transformers.streamed_states import StateStream
from cxl_offload.integrations.transformers.tier_states import TierStates
from cxl_offload.integrations.transformers.weights import store_for
from cxl_offload.memory import Bind, Session
from cxl_offload.topology import load_machine

from .commands import MACHINE, command, run
from .conftest import machine
from .fake_accelerator import FakeCopies, fake_accelerator, pinning_session
from .models import generate, make
from .test_streamed_states import FAR, PROMPT


@pytest.fixture
def session(driver: _C.FakeDriver) -> Iterator[Session]:
    with pinning_session(machine(), driver) as session:
        yield session


@pytest.mark.parametrize("nth", [1, 8, 15, 22, 23, 24, 25, 26, 40])
def test_refused_copy_ends_the_call_and_returns_all_memory(
    nth: int, session: Session, driver: _C.FakeDriver, accelerator: str
) -> None:
    """Weights, rows on their way in, and rows on their way back."""
    model = make("llama")
    stock = generate(model, "sdpa")
    with offload(model, FAR, rows_at_once=1, accelerator="cuda", session=session) as done:
        driver.fail_copy(nth)
        with pytest.raises(OSError, match="refused"):
            generate(model)
        gc.collect()  # frames of the error
        assert done.store.use()[("activations", "host")].live_bytes == 0
        assert torch.equal(generate(model), stock)


@pytest.mark.parametrize("at", [0, 1])
def test_interrupt_inside_of_a_layer_returns_all_memory(
    at: int, session: Session, accelerator: str
) -> None:
    model = make("llama")
    stock, calls = generate(model, "sdpa"), []

    def fail(*_: Any) -> None:
        calls.append(0)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with offload(model, FAR, rows_at_once=1, accelerator="cuda", session=session) as done:
        removable = model.model.layers[at].mlp.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            generate(model)
        removable.remove()
        gc.collect()  # frames of the error
        assert done.store.use()[("activations", "host")].live_bytes == 0
        assert torch.equal(generate(model), stock)
    assert not any("forward" in vars(each) for each in model.modules())


def test_full_tier_is_a_memory_error_and_leaves_the_model_as_it_was(
    driver: _C.FakeDriver, accelerator: str
) -> None:
    with pinning_session(machine(cxl_bytes=17 << 20), driver) as session:
        model, policies = make("llama"), {"kv": "bind:0", "activations": "bind:2"}
        ids = torch.ones(64, 200, dtype=torch.long)
        with offload(model, policies, rows_at_once=1, accelerator="cuda", session=session):
            with pytest.raises(MemoryError), torch.no_grad():
                model(ids)
            assert generate(model, max_new_tokens=2).shape == (4, PROMPT + 2)


def test_states_in_a_tier_are_not_written_to(session: Session, driver: _C.FakeDriver) -> None:
    copies = FakeCopies(session, driver)
    stream = StateStream(copies, store_for({"activations": Bind((1,))}, session, pin=True), 2)
    states = TierStates(stream.host_memory((3, 4), torch.float32), stream)
    states.host.fill_(2)
    with pytest.raises(TypeError, match="read only"):
        states.mul_(2)
    with pytest.raises(TypeError, match="read only"):
        torch.add(torch.ones(3, 4), 1, out=states)
    with pytest.raises(TypeError, match="read only"):
        torch._foreach_add_([torch.ones(3, 4), states], 1)
    saved = io.BytesIO()
    torch.save(states, saved)
    saved.seek(0)
    for made in (copy.deepcopy(states), torch.load(saved)):
        assert type(made) is torch.Tensor
        assert torch.equal(made, states.host)
        assert made.data_ptr() != states.host.data_ptr()
    assert states.tolist() == [[2.0] * 4] * 3
    assert torch.equal(torch.zeros(3, 4).add_(states), states.host)
    doubled = states * 2
    assert isinstance(doubled, TierStates)
    assert session.find(doubled.host.data_ptr()) is not None
    assert torch.equal(doubled.on_device(), torch.full((3, 4), 4.0))
    assert not isinstance(states.sum(), TierStates)
    assert float(states.sum()) == 24
    assert isinstance(states[:, 1:], TierStates)
    assert not isinstance(states[1:], TierStates)
    copies.close()


def test_model_that_was_moved_to_an_accelerator_is_refused(session: Session) -> None:
    """Nothing would copy its hidden states, and a tier that is asked for is a promise."""
    with pytest.raises(ConfigError, match=r"on meta, and only accelerator= copies") as error:
        offload(make("llama").to("meta"), FAR, rows_at_once=2, session=session)
    assert "\n" not in str(error.value)


def test_command_line_says_where_hidden_states_were(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, found = _C.FakeDriver(), {}
    session = Session.simulated(load_machine(MACHINE), driver=driver)
    monkeypatch.setattr(fit, "session_on", lambda *_: session)
    fake_accelerator(monkeypatch, lambda session: FakeCopies(session, driver))
    for name, more in (("tier", ["--place", "activations=cxl"]), ("there", [])):
        file = tmp_path / f"{name}.json"
        places = ["--place", "weights=cxl", "--place", "kv=ldram", *more, "--gen-len", "4"]
        asked = [*places, "--rows-at-once", "1", "--accelerator", "cuda", "--output", str(file)]
        assert run(command(folder, *asked)) == 0
        found[name] = json.loads(file.read_text())
    assert found["tier"]["tokens"] == found["there"]["tokens"]
    rows = {row["kind"]: row for row in found["tier"]["placement"]}
    assert rows["activations"]["requested_bytes"] > 0
    assert "activations" not in {row["kind"] for row in found["there"]["placement"]}
