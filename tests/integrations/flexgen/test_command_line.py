"""``cxl-offload flexgen``: answers and tables, or one line and a non-zero exit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from cxl_offload.cli.main import main
from cxl_offload.sim.trace import Trace

from .conftest import SHAPE
from .reference import generate_with_transformers

_ON_HOST = ("0", "100", "0", "100", "0", "100")
PROMPTS = ("The third tier", "A cache that forgets", "Measure first, then", "When a node is full")


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS[:2]) + "\n\n" + "\n".join(PROMPTS[2:]) + "\n")
    return file


def _exit_status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["flexgen", *arguments])
    return int(ended.value.code or 0)


def test_run_prints_tables_and_answers_and_writes_what_was_asked(
    tiny: Path, prompt_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = _exit_status(
        *("--model", str(tiny), "--prompts", str(prompt_file), "--gen-len", "6"),
        *("--percent", "50", "50", "50", "50", "0", "100", "--cpu-cache-compute"),
        *("--tier", "ldram=0:64MiB", "--place", "kv=bind:ldram", "--place", "weights=bind:0"),
        *("--offload-dir", str(tmp_path / "offload"), "--accelerator", "host"),
        *("--output", str(tmp_path / "report.json"), "--trace", str(tmp_path / "trace.json")),
        *("--log-file", str(tmp_path / "run.log")),
    )

    out = capsys.readouterr().out
    assert status == 0
    assert "in a GPU's place" in out
    assert re.search(
        r"Load \(measured\): fault-in .* GB/s\), reading .* GB/s\), rest ",
        " ".join(out.split()),
    )
    assert "requested" in out
    assert "realised" in out
    assert "granted" in out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["accelerator"] == "host"
    assert report["rows"] == 4
    assert len(report["answers"]) == 4
    assert not report["simulated_placement"]
    rows = [[2, *(4 + byte for byte in text.encode())] for text in PROMPTS]
    longest = max(map(len, rows))
    padded = [[1] * (longest - len(row)) + row for row in rows]
    expected = generate_with_transformers(tiny, padded, new_tokens=6)
    assert np.array(report["tokens"]).tolist() == expected.tokens.tolist()
    assert Trace.load(tmp_path / "trace.json").tokens["decode"] == 4 * 5
    assert "prefill throughput" in (tmp_path / "run.log").read_text()
    assert not (tmp_path / "offload").exists()


def test_machine_file_places_on_simulated_nodes(
    tiny: Path, prompt_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = _exit_status(
        *("--model", str(tiny), "--prompts", str(prompt_file), "--gen-len", "3"),
        *("--percent", "0", "100", "0", "100", "0", "100", "--machine", "epyc9354-cxl-a"),
        *("--place", "kv=bind:cxl", "--place", "weights=split:ldram=60,cxl=40"),
        *("--offload-dir", str(tmp_path / "offload"), "--output", str(tmp_path / "report.json")),
    )

    assert status == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["simulated_placement"]
    per_kind = {(row["kind"], row["part"]): row for row in report["placement"]}
    assert all(row["role"] == row["kind"] for row in report["placement"])  # for one version
    assert set(per_kind["kv", "host"]["granted_bytes_per_tier"]) == {"cxl"}
    assert set(per_kind["weights", "cxl"]["granted_bytes_per_tier"]) == {"cxl"}
    simulated = report["simulated"]
    assert simulated["kind"] == "simulated"
    assert simulated["tokens_per_s"]["decode"] > 0
    assert simulated["node_bytes"]["2"] > 0
    printed = capsys.readouterr().out
    assert "simulated nodes" in printed
    assert "replayed on epyc9354-cxl-a" in printed


def test_prompt_of_flexgen_itself_without_a_file(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = _exit_status(
        *("--model", str(tiny), "--gen-len", "2", "--gpu-batch-size", "2"),
        *("--offload-dir", str(tmp_path / "offload"), "--output", str(tmp_path / "report.json")),
    )

    assert status == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["prompt_len"] == 1 + len("Paris is the capital city of")
    assert report["tokens"][0] == report["tokens"][1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--percent", "60", "60", "0", "100", "0", "100"), "at most 100"),
        (("--percent", "1", "2"), "six numbers"),
        (("--percent", "a", "0", "0", "0", "0", "0"), "--percent"),
        (("--tier", "ldram=9:1GiB"), "node 9"),
        (("--tier", "ldram=0:1"), "ldram=0:1"),
        (("--place", "kv=bind:nowhere", "--percent", *_ON_HOST), "nowhere"),
        (("--place", "kv=bind:0", "--place", "kv=bind:0"), "placed twice"),
        (("--machine", "no-such-machine"), "no-such-machine"),
        (("--prompts", "/nowhere/prompts.txt"), "/nowhere/prompts.txt"),
        (("--debug-mode", "breakdown"), "--cut-gen-len"),
        (("--log-file", "auto"), "--log-file auto"),
        (("--log-file", "a.log", "--no-log"), "--log-file a.log: --no-log writes none"),
        (("--profile", "p.json", "--json"), "--profile p.json: --json does not hold"),
        (("--accelerator", "tpu"), "tpu"),
        (("--gen-len", "many"), "--gen-len"),
        (("--no-such-flag",), "--no-such-flag"),
        (("--gen-len", "500"), "64 positions"),
    ],
)
def test_bad_command_line_is_one_line_and_a_failure(
    arguments: tuple[str, ...],
    words: str,
    tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    offload = tmp_path / "offload"

    status = _exit_status("--model", str(tiny), "--offload-dir", str(offload), *arguments)

    captured = capsys.readouterr()
    assert status != 0
    assert len(captured.err.splitlines()) == 1
    assert words in captured.err
    assert captured.out == ""
    assert not offload.exists()


def test_missing_model_is_one_line_and_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_status("--gen-len", "2") != 0
    assert "--model" in capsys.readouterr().err
    assert _exit_status("--model", "/nowhere/opt") != 0
    assert "/nowhere/opt does not exist" in capsys.readouterr().err


def test_help_has_flexgens_flags_and_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_status("--help") == 0
    out = capsys.readouterr().out
    for flag in ("--cpu-cache-compute", "--sep-layer", "--tier", "--place", "--accelerator"):
        assert flag in out


def test_tiny_model_has_the_shape_the_tests_count_on() -> None:
    assert (SHAPE.layers, SHAPE.hidden, SHAPE.vocab) == (3, 64, 272)
