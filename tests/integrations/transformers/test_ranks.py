"""Generations that several processes divide: prompts, or the weights and heads of every layer."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import RankPart

from .commands import command, run
from .models import FAMILIES, PAD, VOCAB, make

pytestmark = pytest.mark.slow(reason="starts two processes that import torch and transformers")

ROOT = Path(__file__).parents[3]
WITHOUT_PLAN = ("opt", "gpt2", "gpt-oss")
DIVIDED = tuple(family for family in FAMILIES if family not in WITHOUT_PLAN)
CLI = ("-c", "import sys; from cxl_offload.cli.main import main; main(sys.argv[1:])")


def run_ranks(*arguments: str, size: int = 2) -> list[subprocess.CompletedProcess[str]]:
    """What torchrun would start, with the variables that it sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    started = [
        subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            text=True,
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(size)
    ]
    ended = []
    for process in started:
        out, said = process.communicate(timeout=900)
        ended.append(subprocess.CompletedProcess([], process.returncode, out, said))
    return ended


def test_models_that_transformers_divides_give_the_tokens_of_one_process(tmp_path: Path) -> None:
    for family in DIVIDED:
        make(family).save_pretrained(tmp_path / family)
    for ended in run_ranks(
        "-m", "tests.integrations.transformers.rank_worker", str(tmp_path), *DIVIDED
    ):
        assert ended.returncode == 0, ended.stderr[-3000:]
        told: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        for family in DIVIDED:
            said = told[family]
            true = {key: said[key] for key in ("loaded_equal", "moved_equal", "divided", "back")}
            assert all(true.values()), (family, said)
            assert said["loaded"] == said["moved"] == [1], (family, said)
            assert set(said["kv"]) == {"2"}, (family, said)
            assert said["calls"][0] > 0 == said["calls"][1], (family, said)
        assert "divided among ranks" in told["numbered"]


@pytest.mark.parametrize("family", WITHOUT_PLAN)
def test_model_without_a_tensor_parallel_plan_is_refused(family: str) -> None:
    with pytest.raises(ConfigError, match="no tensor parallel plan") as caught:
        RankPart(0, 2, "tensors").check(make(family))
    assert "\n" not in str(caught.value)
    RankPart(0, 2, "rows").check(make(family))


@pytest.mark.parametrize("divided", ["rows", "tensors"])
def test_command_under_torchrun_reports_what_one_process_reports(
    divided: str, folder: Path, tmp_path: Path
) -> None:
    places = ("--place", "weights=bind:ldram", "--place", "kv=cxl", "--gen-len", "6")
    alone, together = tmp_path / "alone.json", tmp_path / "together.json"
    assert run(command(folder, *places, "--output", str(alone))) == 0
    first, second = run_ranks(
        *CLI, *command(folder, *places, "--ranks", divided, "--output", str(together))
    )
    assert (first.returncode, second.returncode) == (0, 0), second.stderr[-3000:]
    assert "by 2 ranks" in " ".join(first.stdout.split())
    assert second.stdout == ""
    one, two = (json.loads(file.read_text()) for file in (alone, together))
    assert two["tokens"] == one["tokens"]
    assert two["answers"] == one["answers"]
    assert (one["ranks"], two["ranks"]) == (1, 2)
    was, now = ({row["kind"]: row for row in each["placement"]} for each in (one, two))
    times = {"rows": 2, "tensors": 1}[divided]
    for kind in ("attention", "mlp"):
        assert now[kind]["requested_bytes"] == times * was[kind]["requested_bytes"]
    assert now["kv"]["requested_bytes"] == was["kv"]["requested_bytes"]
    assert set(now["kv"]["granted_bytes_per_tier"]) == {"cxl"}


def test_ranks_together_get_no_more_than_a_node_has(folder: Path, tmp_path: Path) -> None:
    """The node holds weights of 32 MiB once, and the cache; two whole models it does not."""
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=512, intermediate_size=2048, num_hidden_layers=2,
        num_attention_heads=8, pad_token_id=PAD, bos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(model)
    text = (ROOT / "configs/machines/spr3-h100.yaml").read_text()
    small = text.replace("{value: 256 GiB, source: Table 1}", "{value: 52 MiB, source: a test}")
    assert small != text
    file = tmp_path / "machine.yaml"
    file.write_text(small)
    asked = ["generate", "--model", str(model), "--prompts", str(folder / "prompts.txt")]
    asked += ["--machine", str(file), "--place", "weights=cxl", "--place", "kv=cxl"]
    asked += ["--gen-len", "3"]
    assert run(asked) == 0
    for ended in run_ranks(*CLI, *asked, "--ranks", "rows"):
        assert ended.returncode != 0
        assert "rank 0: " in ended.stderr
        assert "node 2" in ended.stderr
        assert "Traceback" not in ended.stderr
    first, second = run_ranks(*CLI, *asked, "--ranks", "tensors")
    assert (first.returncode, second.returncode) == (0, 0), second.stderr[-3000:]


def test_what_one_rank_cannot_do_is_said_by_all(folder: Path) -> None:
    options = ("--place", "kv=cxl", "--ranks", "tensors")
    for ended in run_ranks(*CLI, *command(folder, *options), size=3):
        assert ended.returncode != 0
        assert "heads, which 3 ranks cannot divide" in " ".join(ended.stderr.split())
        assert "Traceback" not in ended.stderr


def test_rows_are_divided_once_and_evenly() -> None:
    for size in (1, 2, 3, 7):
        parts = [RankPart(rank, size).rows(7) for rank in range(size)]
        assert [row for part in parts for row in range(7)[part]] == list(range(7))
        counts = [len(range(7)[part]) for part in parts]
        assert max(counts) - min(counts) <= 1
    with pytest.raises(ConfigError, match="2 prompts for 3 ranks"):
        RankPart(0, 3).rows(2)
    assert RankPart(2, 3, "tensors").rows(2) == slice(0, 2)
    with pytest.raises(ConfigError, match="rows or tensors"):
        RankPart(0, 2, "columns")  # type: ignore[arg-type]
