"""``--metrics`` and ``--events`` of commands, and programs that cannot be changed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cxl_offload.cli.main import main
from cxl_offload.errors import ConfigError
from cxl_offload.metrics.environment import read_address

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import os, sys, time, urllib.request
import torch, cxl_offload
kept = cxl_offload.zeros(1 << 22, dtype=torch.uint8, policy="bind:0")
for _ in range(600):
    try:
        text = urllib.request.urlopen(sys.argv[1]).read().decode()
        break
    except OSError:
        time.sleep(0.05)
cxl_offload.move(kept, "interleave:0")
print([line for line in text.splitlines() if line.startswith("cxl_offload_pool_asked_bytes")])
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def test_program_that_cannot_be_changed_serves_at_its_rank_s_port(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    port = free_port()
    words = ["run", "--metrics", str(port - 1), "--events", "events.jsonl", "--report", "run.html"]
    program = [sys.executable, "train.py", f"http://127.0.0.1:{port}/metrics"]
    done = subprocess.run(
        [sys.executable, "-m", "cxl_offload.cli.main", *words, "--", *program],
        env={**os.environ, "PYTHONPATH": str(ROOT), "LOCAL_RANK": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "cxl_offload_pool_asked_bytes 4.194304e+06" in done.stdout
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (event["event"], event["target"]) == ("move", "interleave:0")
    page = (tmp_path / "run.html").read_text()
    assert "train.py" in page
    assert "No process on this machine reported a placement" in page


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9400", ("127.0.0.1", 9400)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:9400", ("::1", 9400)),
    ],
)
def test_address_of_the_command_line_is_read(text: str, address: tuple[str, int]) -> None:
    assert read_address(text) == address


@pytest.mark.parametrize("text", ["", "host", "host:", ":9400", "1e3", "-1", "٣", "1" * 99])
def test_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="need PORT or HOST:PORT"):
        read_address(text)


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose only word is Hello, and a prompt."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    from cxl_offload.integrations.flexgen.seeded import OptShape, make_opt

    made = tmp_path_factory.mktemp("made") / "opt"
    make_opt(made, OptShape(layers=1, hidden=32, heads=2))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"Hello": 0}, unk_token="Hello"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="Hello")
    fast.save_pretrained(made)
    (made / "prompts").write_text("Hello\n")
    return made


@pytest.mark.parametrize("command", ["run", "generate", "flexgen"])
def test_command_refuses_an_address_before_anything_runs(
    command: str, opt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {
        "run": ["--", sys.executable, "-c", "raise SystemExit(9)"],
        "generate": ["--place", "kv=bind:0", "--gen-len", "2"],
        "flexgen": ["--gen-len", "2", "--percent", "0", "100", "0", "100", "0", "100"],
    }[command]
    if command != "run":
        words += ["--model", str(opt), "--prompts", str(opt / "prompts")]
    with pytest.raises(SystemExit) as ended:
        main([command, "--metrics", "nowhere", *words])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "need PORT or HOST:PORT" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("command", ["generate", "flexgen"])
def test_command_says_where_it_serves_and_logs(
    command: str,
    opt: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXL_OFFLOAD_EVENTS", str(tmp_path / "events"))
    words = ["--model", str(opt), "--prompts", str(opt / "prompts"), "--gen-len", "2"]
    if command == "flexgen":
        words += ["--percent", "0", "100", "0", "100", "0", "100", "--no-log"]
        words += ["--accelerator", "host", "--offload-dir", str(tmp_path / "offload")]
    with pytest.raises(SystemExit) as ended:
        main([command, *words, "--place", "kv=bind:0", "--metrics", "0"])
    assert not ended.value.code
    assert "metrics: http://127.0.0.1:" in capsys.readouterr().err
    assert (tmp_path / "events").exists()
