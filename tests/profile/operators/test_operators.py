"""Operators timed for real, in little time; what they say is kept by a profile's file."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from typer.testing import CliRunner

from cxl_offload.cli.main import app, main
from cxl_offload.errors import ConfigError
from cxl_offload.files import encode
from cxl_offload.plan.kv_types import KV_TYPES
from cxl_offload.profile import load_profile
from cxl_offload.profile.operators import gated_layer
from cxl_offload.profile.operators import measure as timed
from cxl_offload.profile.operators.measure import measure_operators
from cxl_offload.profile.operators.model import OperatorProfile
from tests.profile.test_profile import profile_of


@pytest.fixture(scope="module")
def measured() -> OperatorProfile:
    """Few sizes and little time: real, and poor. Seconds of the processor, not of the clock, which
    counts other programs on a busy machine; one thread, as those that wait for another one spin."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timed, "_WIDTHS", (256, 1024))
        patch.setattr(gated_layer, "WIDTHS", (256, 512))
        patch.setattr(timed, "ring_bytes", lambda: 8 << 20)
        try:
            return measure_operators(seconds=0.5, rows=(1, 4), clock=time.process_time)
        finally:
            torch.set_num_threads(threads)


@pytest.mark.slow(reason="measures")
def test_every_operator_is_measured_at_every_size(measured: OperatorProfile) -> None:
    sizes = [2 * 256**2, 8 * 256**2, 2 * 1024**2, 8 * 1024**2]
    assert [(point.weight_bytes, point.rows) for point in measured.linears] == [
        (size, rows) for size in sizes for rows in (1, 4)
    ]
    names = [point.operator for point in measured.caches]
    assert names == ["copied attention", "attention in place", "load"] * 2
    assert [(point.hidden, point.rows) for point in measured.layers] == [
        (hidden, rows) for hidden in (256, 1024) for rows in (1, 4)
    ]
    assert measured.device == "cpu"
    assert measured.threads == 1


@pytest.mark.slow(reason="measures layers")
def test_what_plans_ask_for_is_measured_too(measured: OperatorProfile) -> None:
    assert {(point.kv_dtype, point.group) for point in measured.cache_types} == {
        *(("", group) for group in (1, 8)),
        *((name, 1) for name in KV_TYPES),
    }
    half, codes = (
        next(point for point in measured.cache_types if (point.kv_dtype, point.group) == (name, 1))
        for name in ("", "int4")
    )
    assert codes.cache_bytes == half.cache_bytes * 9 // 32  # 4.5 bits in place of 16
    assert measured.adam is not None
    assert 1e8 < measured.adam.bytes_per_s < 1e13


def test_more_bytes_take_longer_and_calls_take_microseconds(measured: OperatorProfile) -> None:
    assert measured.linear_s(1, 8 * 1024**2) > measured.linear_s(1, 2 * 256**2)
    for layer in measured.layers:
        assert 1e-10 < layer.python_instruction_s.median < layer.call_s.median < 1e-3


def test_the_clock_that_is_given_is_the_one_that_is_read() -> None:
    ticks = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timed, "_WIDTHS", (128,))
        patch.setattr(timed, "ring_bytes", lambda: 1 << 20)
        found = measure_operators(
            seconds=1e-3, rows=(1,), only="flexgen", clock=lambda: float(next(ticks))
        )
    # Every operator takes one tick, which is what an empty measurement takes too: nothing is left.
    seconds = [point.seconds.median for point in (*found.linears, *found.caches)]
    assert max(seconds) == pytest.approx(1e-9)


def test_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="time above 0"):
        measure_operators(seconds=0)


def test_command_writes_operators_that_load_back(tmp_path: Path, measured: OperatorProfile) -> None:
    file = tmp_path / "profile.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timed, "measure_operators", lambda device, progress: measured)
        arguments = ["profile", "--quick", "--seconds", "0.5", "--working-set", "8MiB"]
        done = CliRunner().invoke(app, [*arguments, "--operators", "cpu", "--output", str(file)])
    assert done.exit_code == 0, done.output
    assert "linear, 4 rows" in done.output
    assert "an instruction of Python" in done.output
    assert load_profile(file).operators == (measured,)
    without = json.loads(file.read_text())
    del without["operators"]
    file.write_text(json.dumps(without))
    assert load_profile(file).operators == ()


def test_operators_of_another_version_are_refused_with_the_remedy(
    tmp_path: Path, measured: OperatorProfile
) -> None:
    document = encode(dataclasses.replace(profile_of(()), operators=(measured,)))
    assert document["operators"][0].pop("version") == 3
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"operators of version 1.*profile --operators"):
        load_profile(file)


def test_unknown_device_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["profile", "--quick", "--operators", "tpu"])
    assert ended.value.code == 2
    assert "--operators tpu: must be cpu or cuda" in capsys.readouterr().err


def test_gpu_that_is_not_there_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    measured = Mock()
    monkeypatch.setattr("cxl_offload.profile.measure_machine", measured)
    with pytest.raises(SystemExit) as ended:
        main(["profile", "--operators", "cpu", "--operators", "cuda"])
    assert ended.value.code == 2
    assert "measure operators on cuda: torch sees no GPU" in capsys.readouterr().err
    measured.assert_not_called()
