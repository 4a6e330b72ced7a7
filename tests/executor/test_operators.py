"""Operators timed for real, in little time; what they say is kept by a profile's file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cxl_offload.cli.main import app, main
from cxl_offload.executor import operators as timed
from cxl_offload.executor.operators import measure_operators
from cxl_offload.profile import load_profile
from cxl_offload.profile.operators import OperatorProfile


@pytest.fixture(scope="module")
def measured() -> OperatorProfile:
    """Few sizes and little time: real, and poor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timed, "_ROWS", (1, 4))
        patch.setattr(timed, "_WIDTHS", (256, 1024))
        patch.setattr(timed, "_COLUMNS", (12, 48))
        patch.setattr(timed, "_BANK_BYTES", 8 << 20)
        return measure_operators(seconds=0.5)


def test_every_operator_is_measured_at_every_size(measured: OperatorProfile) -> None:
    assert [(point.rows, point.weight_bytes) for point in measured.linears] == [
        (1, 2 * 256 * 256),
        (4, 2 * 256 * 256),
        (1, 2 * 1024 * 1024),
        (4, 2 * 1024 * 1024),
    ]
    names = [point.operator for point in measured.caches]
    assert names == ["copied attention", "attention in place", "load"] * 2
    assert measured.device == "cpu"
    assert measured.threads == torch.get_num_threads()


def test_more_bytes_take_longer_and_calls_take_microseconds(measured: OperatorProfile) -> None:
    small, large = measured.linears[0], measured.linears[2]
    assert large.seconds.median > small.seconds.median
    assert 1e-10 < measured.python_instruction_s.median < 1e-5
    assert 1e-8 < measured.small_s.median < 1e-3
    assert measured.python_instruction_s.median < measured.small_s.median


def test_copied_attention_and_attention_in_place_compute_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.rand(24, 1, 64, generator=generator).half()
    k, v = (torch.rand(32, 24, 64, generator=generator).half() for _ in range(2))
    mask = torch.ones(2, 32, dtype=torch.bool)
    mask[1, :5] = False
    copied = timed._copied_attention(q, k, v, mask).view(2, 12, 64)
    in_place = timed._attention_in_place(q, k, v, mask).view(2, 12, 64)
    torch.testing.assert_close(copied, in_place, atol=2e-3, rtol=2e-3)


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
    assert load_profile(file).operators == (measured,)
    without = json.loads(file.read_text())
    del without["operators"]
    file.write_text(json.dumps(without))
    assert load_profile(file).operators == ()


def test_unknown_device_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["profile", "--quick", "--operators", "tpu"])
    assert ended.value.code == 2
    assert "--operators tpu: must be cpu or cuda" in capsys.readouterr().err
