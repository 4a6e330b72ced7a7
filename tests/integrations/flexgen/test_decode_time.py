"""What decode predictions assume of FlexGen is so, and a run prints its prediction."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from cxl_offload.cli.main import main
from cxl_offload.errors import ConfigError
from cxl_offload.integrations.flexgen import FlexGenRun, Session
from cxl_offload.integrations.flexgen.expected import decode_shape
from cxl_offload.memory import Memory
from cxl_offload.plan.flexgen import decode_time as equations
from cxl_offload.plan.flexgen.decode_time import KvHome
from cxl_offload.profile.codec import encode

from ...plan.test_decode_time import operators
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


def instructions_of_one_token(session: Session) -> int:
    """Of the Python interpreter, while one token is decoded."""
    counted, counting = 0, False

    def begins(token: int) -> None:
        nonlocal counting
        counting = token == TOKEN

    def count(frame: FrameType, event: str, _: object) -> object:
        nonlocal counted
        frame.f_trace_opcodes = True
        counted += counting and event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        session.generate(token_begins=begins)
    finally:
        sys.settrace(before)
    return counted


@pytest.mark.parametrize("kv", OPTIONS)
def test_a_layer_takes_as_many_instructions_as_the_equations_say(
    kv: KvHome, request_of: Request
) -> None:
    # Linear layers in half precision are one call each; others are timed with what they call.
    request = request_of(**OPTIONS[kv], cpu_linear="half")
    with Session(request, memory=Memory.linux()) as session:
        layers = session.model.config.num_hidden_layers
        counted = instructions_of_one_token(session) / layers
    # The layers before and after the decoder's take some too, and other Pythons count differently.
    assert counted == pytest.approx(equations._CALLS[kv][1], rel=0.3)


@pytest.mark.parametrize("kv", OPTIONS)
def test_the_shape_is_that_of_the_request(kv: KvHome, request_of: Request) -> None:
    request = request_of(**OPTIONS[kv])
    with Session(request, memory=Memory.linux()) as session:
        shape = decode_shape(request, session.model.config, prompt_len=12)
    assert (shape.kv, shape.rows, shape.layers, shape.hidden) == (kv, 8, 3, 64)
    assert (shape.host_weights, shape.attended) == (0.0, 12 + 4)


@pytest.mark.parametrize(
    "options",
    [
        {"percent": (100, 0, 50, 50, 100, 0)},
        {"percent": (100, 0, 0, 0, 100, 0)},
        {"compress_cache": True},
        {"cpu_cache_compute": True, "cpu_attention": "workspace"},
        {"cpu_linear": "half"},
    ],
)
def test_what_the_equations_do_not_cover_is_refused(
    options: dict[str, Any], request_of: Request
) -> None:
    with Session(request_of(), memory=Memory.linux()) as session:
        config = session.model.config
    with pytest.raises(ConfigError, match="no prediction"):
        decode_shape(request_of(**options), config, prompt_len=12)


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
