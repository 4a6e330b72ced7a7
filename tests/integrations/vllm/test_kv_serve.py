"""``vllm serve`` with flags alone: the same tokens, our counters, aborts, no file left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from cxl_offload.memory.shared import SHARED_ROOT
from tests.integrations.vllm.conftest import (
    ENVIRONMENT,
    ROOT,
    kv_offload,
    left_behind,
    shared_files,
)
from tests.integrations.vllm.tiny_model import CHUNK, DTYPE, prompt

START_S = 150.0


class Server:
    """A running ``vllm serve`` on loopback."""

    def __init__(self, model: str, log: Path, *flags: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [str(Path(sys.executable).with_name("vllm")), "serve", model]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "tiny"]
        command += ["--enforce-eager", "--max-model-len", "512", "--dtype", DTYPE]
        command += ["--max-num-seqs", "4", "--block-size", "32", *flags]
        environment = ENVIRONMENT | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
        self._out = log.open("w")
        self.process = subprocess.Popen(
            command, env=os.environ | environment, stdout=self._out, stderr=subprocess.STDOUT
        )
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait(self) -> None:
        stop = time.monotonic() + START_S
        while time.monotonic() < stop:
            assert self.process.poll() is None, self.log[-3000:]
            with contextlib.suppress(OSError):
                self.get("/health")
                return
            time.sleep(0.5)
        raise AssertionError(f"no answer after {START_S} s: {self.log[-3000:]}")

    def get(self, path: str, data: bytes | None = None) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=data,
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())

    def body(self, seed: int, **options: Any) -> bytes:
        request = {
            "model": "tiny",
            "prompt": prompt(seed),
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return json.dumps(request | options).encode()

    def ask(self, seed: int) -> list[int]:
        answer = json.loads(self.get("/v1/completions", self.body(seed)))
        return list(answer["choices"][0]["token_ids"])

    def abort(self, seed: int) -> None:
        """Asks for a long stream and hangs up after its first bytes."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = self.body(seed, max_tokens=200, stream=True)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        assert connection.getresponse().read(16)
        connection.close()

    def metrics(self) -> dict[str, float]:
        found = {}
        for line in self.get("/metrics").splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                found[name.replace('engine="0",', "").replace(',model_name="tiny"', "")] = float(
                    value
                )
        return found

    def counter(self, event: str, tier: str) -> float:
        series = f"vllm:cxl_offload_kv_{event}_chunks_total"
        return sum(
            value
            for name, value in self.metrics().items()
            if name.startswith(series) and f'tier="{tier}"' in name
        )

    def engine(self) -> int:
        """Process id of the engine core."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        for child in children.split():
            if "EngineCore" in Path(f"/proc/{child}/comm").read_text() + Path(
                f"/proc/{child}/cmdline"
            ).read_text().replace("\0", " "):
                return int(child)
        raise AssertionError(f"no engine among {children}")

    def regions(self) -> set[str]:
        """What the engine core has mapped of shared KV caches, as its maps name it."""
        lines = Path(f"/proc/{self.engine()}/maps").read_text().splitlines()
        prefix = f"{SHARED_ROOT}/cxl_offload_kv_"
        return {line[line.index(prefix) :] for line in lines if prefix in line}

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self._out.close()


@pytest.fixture
def server(model: str, tmp_path: Path) -> Iterator[Server]:
    config = kv_offload(
        policy="bind:0", cold={"bytes": "8MiB", "policy": "bind:0", "eviction_policy": "arc"}
    )["kv_transfer_config"]["kv_connector_extra_config"]
    made = Server(
        model,
        tmp_path / "serve.log",
        "--kv-offloading-size",
        str(20 * CHUNK / (1 << 30)),
        "--kv-transfer-config",
        json.dumps({"kv_connector_extra_config": config}),
    )
    yield made
    made.stop()


@pytest.mark.timeout(400)
def test_server_gives_the_same_tokens_from_both_tiers_and_leaves_nothing_when_killed(
    server: Server, plain_six: list[list[int]]
) -> None:
    before = shared_files()
    server.wait()
    regions = server.regions()
    assert regions
    assert all(name.endswith(" (deleted)") for name in regions), "unnamed once all have mapped it"
    assert [server.ask(seed) for seed in range(6)] == plain_six
    server.get("/reset_prefix_cache", b"")
    assert [server.ask(seed) for seed in range(6)] == plain_six
    assert server.counter("stored", "cold") == 54
    assert server.counter("loaded", "cold") >= 54 - 20
    assert server.counter("loaded", "hot") >= 50
    assert server.counter("evicted", "hot") > 0
    assert server.counter("refused", "cold") == 0
    for seed in range(6):
        server.abort(seed)
    server.get("/reset_prefix_cache", b"")
    assert [server.ask(seed) for seed in range(6)] == plain_six
    os.kill(server.engine(), signal.SIGKILL)
    assert server.process.wait(90) is not None, "the server ends with its engine"
    assert not left_behind(before)
    assert "AssertionError" not in server.log
