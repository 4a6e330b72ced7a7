"""What decode predictions assume of FlexGen is so, and a run prints its prediction."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from cxl_offload.cli.main import main
from cxl_offload.errors import ConfigError
from cxl_offload.files import encode
from cxl_offload.integrations.flexgen import FlexGenRun, LoadedModel, attention
from cxl_offload.integrations.flexgen.accelerator import HostAccelerator
from cxl_offload.integrations.flexgen.copies import Copier
from cxl_offload.integrations.flexgen.expected import decode_shape
from cxl_offload.memory import Session
from cxl_offload.ops.measured_linear import MeasuredLinear
from cxl_offload.plan.flexgen import decode_time as equations
from cxl_offload.plan.flexgen.decode_time import KvHome

from ...plan.flexgen.test_decode_time import operators
from ...profile.test_profile import profile_of

OPTIONS: dict[KvHome, dict[str, Any]] = {
    "accelerator": {"percent": (100, 0, 100, 0, 100, 0)},
    "host, in place": {"percent": (100, 0, 0, 100, 100, 0), "cpu_cache_compute": True},
    "host, loaded": {"percent": (100, 0, 0, 100, 100, 0)},
}
TOKEN = 3
Request = Callable[..., FlexGenRun]


@pytest.fixture
def request_of(tiny: Path, prompts: tuple[tuple[int, ...], ...]) -> Request:
    def make(**options: Any) -> FlexGenRun:
        return FlexGenRun(
            model=str(tiny),
            token_ids=prompts,
            gen_len=8,
            gpu_batch_size=8,
            record=False,
            **options,
        )

    return make


class CallsOfTorch(TorchDispatchMode):
    """Counts what reaches torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not is_paused()
        return func(*args, **(kwargs or {}))


paused: list[str] = []
"""Operators that are running: they are timed with all that they call."""


def is_paused() -> bool:
    return bool(paused)


@pytest.fixture
def operators_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is counted inside of linear layers and attention."""
    for owner, name in (
        (MeasuredLinear, "__call__"),
        (HostAccelerator, "_attention_value"),
        (attention, "decode_attention"),
    ):
        monkeypatch.setattr(owner, name, pausing(getattr(owner, name)))


def pausing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        paused.append(function.__name__)
        try:
            return function(*args, **options)
        finally:
            paused.pop()

    return call


def one_token(loaded: LoadedModel) -> tuple[int, int]:
    """Calls of torch, and instructions of the Python interpreter, while one token is decoded."""
    counted, calls = 0, CallsOfTorch()

    def count(frame: FrameType, event: str, _: object) -> object:
        nonlocal counted
        frame.f_trace_opcodes = True
        counted += event == "opcode" and not is_paused()
        return count

    before = sys.gettrace()

    def begins(token: int) -> None:
        if token == TOKEN:
            calls.__enter__()
        elif token == TOKEN + 1:
            calls.__exit__(None, None, None)
            sys.settrace(count)
        elif token == TOKEN + 2:
            sys.settrace(before)

    try:
        loaded.generate(token_begins=begins)
    finally:
        sys.settrace(before)
    return calls.count, counted


@pytest.mark.usefixtures("operators_apart")
@pytest.mark.parametrize("kv", OPTIONS)
def test_a_layer_takes_as_many_calls_and_instructions_as_the_equations_say(
    kv: KvHome, request_of: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What FlexGen does for a GPU is counted where its loads are copies.
    monkeypatch.setattr(Copier, "stays_in_host_memory", kv == "host, in place")
    with LoadedModel(request_of(**OPTIONS[kv]), session=Session.linux()) as loaded:
        layers = loaded.model.config.num_hidden_layers
        calls, instructions = (each / (layers + 1) for each in one_token(loaded))
    assert (calls, instructions) == pytest.approx(equations.CALLS[kv], rel=0.1)


@pytest.mark.parametrize("kv", OPTIONS)
def test_the_shape_is_that_of_the_request(kv: KvHome, request_of: Request) -> None:
    request = request_of(**OPTIONS[kv])
    loaded = LoadedModel(request, session=Session.linux())
    config, shares = loaded.source.config, loaded.layout.rows
    on_gpu = replace(request, accelerator="cuda")
    shape = decode_shape(on_gpu, config, prompt_len=12, shares=shares)
    assert (shape.kv, shape.rows, shape.layers, shape.hidden) == (kv, 8, 3, 64)
    assert (shape.host_weights, shape.attended) == (0.0, 12 + 4)
    shape = decode_shape(request, config, prompt_len=12, shares=shares)
    assert shape.kv == "host, in place"


def test_weights_on_the_host_are_loaded_to_a_gpu_only(request_of: Request) -> None:
    request = request_of(percent=(0, 100, 0, 100, 0, 100))
    loaded = LoadedModel(request, session=Session.linux())
    config, shares = loaded.source.config, loaded.layout.rows
    shapes = [
        decode_shape(replace(request, accelerator=where), config, prompt_len=12, shares=shares)
        for where in ("cuda", "host")
    ]
    assert [shape.host_weights for shape in shapes] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("options", "accelerator"),
    [
        ({"percent": (100, 0, 50, 50, 100, 0)}, "cuda"),
        ({"percent": (100, 0, 0, 0, 100, 0)}, "host"),
        ({"compress_cache": True}, "host"),
        ({"cpu_cache_compute": True, "cpu_attention": "workspace"}, "host"),
        ({"cpu_linear": "half"}, "host"),
    ],
)
def test_what_the_equations_do_not_cover_is_refused(
    options: dict[str, Any], accelerator: Any, request_of: Request
) -> None:
    request = request_of(**options)
    loaded = LoadedModel(request, session=Session.linux())
    asked = replace(request, accelerator=accelerator)
    with pytest.raises(ConfigError, match="no prediction"):
        decode_shape(asked, loaded.source.config, prompt_len=12, shares=loaded.layout.rows)


def run(arguments: list[str]) -> object:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def test_command_prints_the_prediction_beside_the_measurement(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    profile = dataclasses.replace(profile_of(()), operators=(operators(),))
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(encode(profile)))
    arguments = ["flexgen", "--model", str(tiny), "--prompts", str(tmp_path / "prompts.txt")]
    arguments += ["--gen-len", "4", "--accelerator", "host", "--profile", str(file)]
    assert run([*arguments, "--percent", "100", "0", "100", "0", "100", "0"]) == 0
    assert "tokens/s predicted from the profile" in capsys.readouterr().out
    file.write_text(json.dumps(encode(profile_of(()))))
    assert run(arguments) == 2
    assert "holds no operators of cpu" in capsys.readouterr().err
