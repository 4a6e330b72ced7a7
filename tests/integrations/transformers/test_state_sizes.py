"""Hidden states in a tier are counted before they exist: what is predicted is what is taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.nn.modules.module import register_module_forward_hook

from cxl_offload import _C
from cxl_offload.cli.main import main
from cxl_offload.errors import ConfigError
from cxl_offload.integrations import fit
from cxl_offload.integrations.transformers import Offloaded, generation, offload
from cxl_offload.integrations.transformers.state_sizes import StateSizes
from cxl_offload.memory import Bind, Session
from cxl_offload.topology import load_machine

from .commands import MACHINE, command, run
from .conftest import machine
from .fake_accelerator import FakeCopies, fake_accelerator, pinning_session
from .models import FAMILIES, generate, make, prompts

FAR = {"weights": "bind:2", "kv": "bind:0", "activations": "bind:1"}
ROWS, AT_ONCE = 7, 3


def sizes(*, tokens: int, streamed: bool, at_once: int | None = AT_ONCE) -> StateSizes:
    return StateSizes(rows=ROWS, tokens=tokens, rows_at_once=at_once, streamed=streamed)


@contextmanager
def buffers_seen(done: Offloaded) -> Iterator[list[int]]:
    """Bytes of the buffers after every module."""
    states, seen = done.streamed_states, [0]

    def look(*_: Any) -> None:
        made = [] if states is None else [*states._in, *states._out]
        seen.append(sum(each.memory.nbytes for each in made if each.memory is not None))

    hook = register_module_forward_hook(look)
    yield seen
    hook.remove()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_counted_is_what_a_run_takes(
    family: str, streamed: bool, driver: _C.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, in the tier and on the accelerator."""
    fake_accelerator(monkeypatch, lambda session: FakeCopies(session, driver))
    model, given = make(family), prompts(ROWS)
    with pinning_session(machine(), driver) as session:
        more: dict[str, Any] = {"accelerator": "cuda" if streamed else None, "session": session}
        with (
            offload(model, FAR, rows_at_once=AT_ONCE, **more) as done,
            buffers_seen(done) as seen,
        ):
            model.generate(**given, max_new_tokens=1, do_sample=False)
        counted = sizes(tokens=given["input_ids"].shape[1], streamed=streamed)
        (need,) = counted.needs(model, Bind((1,)))
        assert need.nbytes * need.count == done.store.use()[("activations", "host")].peak_bytes
        assert counted.buffers_bytes(model, FAR) == max(seen)
        assert (max(seen) > 0) is streamed


def test_nothing_is_counted_where_all_rows_are_computed_at_once() -> None:
    model = make("llama")
    for at_once in (None, ROWS, ROWS + 1):
        counted = sizes(tokens=5, streamed=True, at_once=at_once)
        assert counted.needs(model, Bind((1,))) == []
        assert counted.buffers_bytes(model, FAR) == 0
    counted = sizes(tokens=5, streamed=True)
    assert counted.buffers_bytes(model, {"weights": "bind:2"}) == 0


@pytest.fixture
def long_prompts(folder: Path, tmp_path: Path) -> Path:
    """Eight rows of several hundred tokens."""
    line = (folder / "prompts.txt").read_text().splitlines()[0]
    file = tmp_path / "long.txt"
    file.write_text("\n".join([" ".join([line] * 8)] * 8) + "\n")
    return file


def asked(file: Path, *more: str, rows: int = 2) -> list[str]:
    places = ["--place", "weights=ldram", "--place", "kv=ldram", "--place", "activations=bind:cxl"]
    return [*places, "--gen-len", "2", "--prompts", str(file), "--rows-at-once", str(rows), *more]


@pytest.mark.parametrize("accelerator", [(), ("--accelerator", "cuda")])
def test_tier_too_small_for_hidden_states_is_said_before_the_model_loads(
    accelerator: tuple[str, ...],
    folder: Path,
    long_prompts: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = _C.FakeDriver()
    session = Session.simulated(load_machine(MACHINE), driver=driver)
    monkeypatch.setattr(fit, "session_on", lambda *_: session)
    fake_accelerator(monkeypatch, lambda session: FakeCopies(session, driver))
    enough = asked(long_prompts, "--limit", "cxl=1GiB", *accelerator)
    assert run(command(folder, *enough)) == 0
    capsys.readouterr()
    monkeypatch.setattr(generation, "load", None)  # would be called
    less = asked(long_prompts, "--limit", "cxl=16KiB", *accelerator)
    assert run(command(folder, *less)) != 0
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "tier cxl: " in line
    assert "(activations " in line


def test_accelerator_too_small_for_buffers_is_said_before_the_model_loads(
    folder: Path,
    long_prompts: Path,
    driver: _C.FakeDriver,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A control has fewer rows at once, and would be loaded."""
    fake_accelerator(monkeypatch, lambda session: FakeCopies(session, driver), free=400 << 10)
    loaded: list[int] = []
    monkeypatch.setattr(generation, "load", lambda *_, **__: loaded.append(1))
    more = ("--accelerator", "cuda")
    with pytest.raises(AttributeError):  # all was checked, and what was loaded is None
        main(command(folder, *asked(long_prompts, *more, rows=1)))
    capsys.readouterr()
    assert loaded
    loaded.clear()
    assert run(command(folder, *asked(long_prompts, *more, rows=7))) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "of buffers of hidden states needs" in said
    assert "400 KiB left; give fewer rows_at_once" in said
    assert not loaded


def test_policy_without_rows_at_once_is_refused_before_the_model_loads(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "load", None)  # would be called
    assert run(command(folder, "--place", "kv=cxl", "--place", "activations=cxl")) == 2
    assert "give rows_at_once, or leave the policy out" in " ".join(capsys.readouterr().err.split())


def test_block_counts_the_buffers_of_the_shortest_pass(
    driver: _C.FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_accelerator(monkeypatch, lambda session: FakeCopies(session, driver), free=1 << 20)
    model = make("llama")
    with pinning_session(machine(), driver) as session:
        offload(model, FAR, rows_at_once=64, accelerator="cuda", session=session)
        with pytest.raises(ConfigError, match="buffers of hidden states needs") as error:
            offload(model, FAR, rows_at_once=1024, accelerator="cuda", session=session)
    assert "\n" not in str(error.value)
    assert generate(model).shape[0] == 4
