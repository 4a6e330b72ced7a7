"""examples/train_gpt_zero_offload.py: a tiny run learns, and FlexGen serves what it saved."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cxl_offload.cli.main import main
from cxl_offload.integrations.flexgen.tokens import ByteTokenizer, load_tokenizer

from ..integrations.flexgen.reference import generate_with_transformers

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_gpt_zero_offload.py"
TINY = ("--layers", "2", "--hidden", "64", "--heads", "4", "--length", "64", "--steps", "30")
TINY += ("--bytes", "300000", "--lr", "3e-3", "--machine", "epyc9354-cxl-a")
LEAST_ACTIVATION = 256 << 10
"""Smaller tensors stay; of four rows of 64 tokens the inner ones of a layer are as large."""
TEXTS = ("def run", "import os\nclass Übung:")


def train(folder: Path, *flags: str, launcher: tuple[str, ...] = ()) -> tuple[dict[str, Any], str]:
    """The losses that a run wrote, and what it printed."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), *TINY, "--output", str(folder), *flags],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "losses.json").read_text()), done.stdout


def assert_learned(result: dict[str, Any]) -> None:
    assert len(result["losses"]) == 30
    assert result["losses"][-1] < 0.8 * result["losses"][0]
    validation = result["validation"]
    assert validation["30"] < 0.8 * validation["0"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("gpt")
    places = "exp_avg=cxl;exp_avg_sq=cxl"
    flags = ("--plain", "--placement", places, "--activations", "cxl", "--accumulation", "2")
    result, printed = train(folder, *flags)
    return folder, result, printed


def test_plain_run_learns_with_its_states_on_the_cxl_node(
    plain: tuple[Path, dict[str, Any], str],
) -> None:
    folder, result, printed = plain
    assert_learned(result)
    assert "exp_avg: bytes by node {2: " in printed
    assert "exp_avg_sq: bytes by node {2: " in printed
    row = re.search(r"activations: (\d+) copies, (\d+) bytes to cxl", printed)
    assert row is not None
    micro_batches = 2 * 30
    assert int(row[1]) >= 2 * micro_batches  # what follows the first linear layer of either layer
    assert int(row[2]) >= int(row[1]) * LEAST_ACTIVATION
    if importlib.util.find_spec("matplotlib") is not None:
        assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_tokenizer_is_of_bytes_and_is_found_beside_the_model(
    plain: tuple[Path, dict[str, Any], str],
) -> None:
    tokenizer = load_tokenizer(plain[0] / "model", 272)
    assert not isinstance(tokenizer, ByteTokenizer)
    every = "".join(map(chr, range(1, 0x180))) + "  \n\t\r\n x"
    for text in (*TEXTS, every):
        assert tokenizer.encode(text) == [2, *(4 + byte for byte in text.encode())]
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_flexgen_serves_the_checkpoint_with_the_tokens_of_transformers(
    plain: tuple[Path, dict[str, Any], str], tmp_path: Path
) -> None:
    model = plain[0] / "model"
    (tmp_path / "prompts.txt").write_text(TEXTS[0] + "\n")
    with pytest.raises(SystemExit) as ended:
        main(
            [
                *("flexgen", "--model", str(model), "--prompts", str(tmp_path / "prompts.txt")),
                *("--gen-len", "8", "--percent", "0", "100", "0", "100", "0", "100"),
                *("--machine", "epyc9354-cxl-a", "--place", "weights=cxl", "--place", "kv=cxl"),
                *("--accelerator", "host", "--offload-dir", str(tmp_path / "offload"), "--no-log"),
                *("--output", str(tmp_path / "report.json")),
            ]
        )
    assert not ended.value.code
    report = json.loads((tmp_path / "report.json").read_text())
    prompt = [2, *(4 + byte for byte in TEXTS[0].encode())]
    expected = generate_with_transformers(model, [prompt], new_tokens=8).tokens.tolist()
    assert report["tokens"] == expected
    assert report["answers"] == [load_tokenizer(model, 272).decode(expected[0][len(prompt) :])]


def test_run_says_that_deepspeed_is_missing(tmp_path: Path) -> None:
    if importlib.util.find_spec("deepspeed") is not None:
        pytest.skip("DeepSpeed is installed here")
    _, printed = train(tmp_path)
    assert "DeepSpeed is not installed: plain torch with offload_optimizer" in printed


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed")
@pytest.mark.parametrize(
    "flags",
    [("--stage", "1"), ("--stage", "2"), ("--stage", "3"), ("--stage", "3", "--offload-param")],
    ids=" ".join,
)
def test_every_stage_of_zero_learns_and_saves_the_same_kind_of_model(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    result, printed = train(tmp_path, *flags, "--placement", "exp_avg=cxl;exp_avg_sq=cxl")
    assert_learned(result)
    row = next(line for line in printed.splitlines() if "exp_avg_sq" in line)
    assert "bind:2" in row
    prompt = [2, *(4 + byte for byte in b"def ")]
    made = generate_with_transformers(tmp_path / "model", [prompt], new_tokens=4)
    assert made.tokens.shape == (1, len(prompt) + 4)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_two_processes_of_torchrun_train_together(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29571")
    result, printed = train(tmp_path, "--stage", "2", launcher=launcher)
    assert_learned(result)
    assert result["processes"] == 2
    assert "rank 0 (1 of 2 on this machine)" in printed


@pytest.mark.slow(reason="trains two models")
@pytest.mark.parametrize(
    ("flags", "states"),
    [
        (("--optimizer", "lion", "--states", "8bit", "--parameters", "bf16"), "exp_avg_codes of "),
        (
            ("--optimizer", "adam", "--states", "bf16", "--parameters", "bf16"),
            "exp_avg_sq of bfloat16: ",
        ),
    ],
    ids=("lion", "adam"),
)
def test_parameters_of_bfloat16_learn_without_master_weights(
    tmp_path: Path, flags: tuple[str, ...], states: str
) -> None:
    result, printed = train(tmp_path, "--plain", *flags, "--lr", "1e-3")
    assert_learned(result)
    assert states in printed
    assert "parameters of bfloat16" in printed
