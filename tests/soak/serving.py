"""Rounds of vLLM: a real engine with tiers in a process of its own, beside all the other rounds."""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from cxl_offload.kept import find_kept, kept_path
from tests.integrations.vllm.conftest import ENVIRONMENT, ROOT, kv_offload

from . import ending
from .beside import pressure
from .left import Held

CHUNK = 32 << 10
"""Bytes of 32 tokens of the tiny model in float32."""

PATIENCE_S = 1200.0
"""An engine that says nothing for so long hangs, however busy the machine is."""

RESTART_AFTER = 10
"""Stints until the engine is killed, and another goes on with what it kept."""

ENGINE = {
    "dtype": "float32",
    "num_gpu_blocks_override": 64,
    "max_model_len": 384,
}


class NotInstalledError(Exception):
    """There is no vLLM that a soak could use."""


def interpreter() -> str:
    """Of the environment that has vLLM, as ``make test-vllm`` makes it."""
    own = os.environ.get("VLLM_VENV", ".venv-vllm")
    python = ROOT / own / "bin" / "python"
    if not python.exists():
        raise NotInstalledError(f"there is no {own}; `make test-vllm` makes it")
    code = (
        "import importlib.metadata as installed, vllm, cxl_offload._C;"
        "plugins = installed.entry_points(group='vllm.general_plugins');"
        "assert 'cxl_offload' in plugins.names, 'it has no plugin of this package'"
    )
    done = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip() or "it does not start").splitlines()[-1]
        raise NotInstalledError(f"{own}: {last}")
    return str(python)


class Server:
    """A process of ``serve.py``."""

    def __init__(self, python: str, model: Path, options: dict[str, Any], log: Path) -> None:
        request = json.dumps({"model": str(model), "options": ENGINE | options})
        self._answers, theirs = os.pipe()
        self._log = log
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with log.open("a") as out:
            self.process = subprocess.Popen(
                [python, "-m", "tests.soak.serve", request, str(theirs)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                pass_fds=(theirs,),
                cwd=ROOT,
                env=os.environ | ENVIRONMENT | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                text=True,
            )
        os.close(theirs)
        self._rest = b""

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self, *, starting: bool = False) -> dict[str, Any]:
        """The next answer; what it finds wrong is raised here, and then the process is killed.

        SystemExit where the soak is to end while an engine is starting.
        """
        try:
            found = self._next(starting)
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        if "wrong" in found:
            raise AssertionError(f"vLLM: {found['wrong']}")
        return found

    def _next(self, starting: bool) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE_S
        while b"\n" not in self._rest:
            if starting and ending.asked.is_set():
                raise SystemExit(128 + ending.received[0])
            ready, _, _ = select.select([self._answers], [], [], 0.5)
            if not ready and time.monotonic() < until:
                continue
            read = os.read(self._answers, 1 << 16) if ready else b""
            if not read:
                why = "ended" if ready else f"said nothing for {PATIENCE_S:g} s"
                raise AssertionError(f"the engine {why}: {self._log.read_text()[-3000:]}")
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self, *, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._answers)


class Serving:
    """The engine of a soak: what it must say, the process that says it, and its kept chunks."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="soak-vllm-")
        self._python = interpreter()
        self._name = f"soak-{os.getpid()}"
        self._model = Path(self._folder.name) / "model"
        self._log = Path(self._folder.name) / "log"
        self._make_model()
        stock = Server(self._python, self._model, {}, self._log)
        stock.answer(starting=True)
        stock.tell(do="expect")
        self._right = stock.answer()["tokens"]
        stock.close()
        self._server = self._start()
        self._stints = 0
        self._is_serving = False
        self.held: tuple[Held, Held] | None = None

    def _make_model(self) -> None:
        code = (
            "import sys; from pathlib import Path;"
            "from tests.integrations.vllm.tiny_model import make_model;"
            "make_model(Path(sys.argv[1]))"
        )
        subprocess.run([self._python, "-c", code, str(self._model)], cwd=ROOT, check=True)

    def _start(self) -> Server:
        """Twenty chunks hot, 80 behind them that are kept; the prompts have 90."""
        cold = {"bytes": 80 * CHUNK, "policy": "bind:0", "persist": self._name}
        options = kv_offload(cpu_bytes_to_use=20 * CHUNK, policy="bind:0", cold=cold)
        server = Server(self._python, self._model, options, self._log)
        server.answer(starting=True)
        return server

    def begin(self, seed: int) -> None:
        """Lets it serve until :meth:`end`; kills it and starts another at times."""
        if self._is_serving:
            return
        self._server.tell(do="begin", seed=seed, right=self._right)
        self._is_serving = True

    def end(self) -> Counter[str]:
        self._is_serving = False
        self._server.tell(do="stop")
        answer = self._server.answer()
        counts: Counter[str] = Counter(answer["counts"])
        # What an engine maps in its first stint is its start.
        is_first = self._stints % RESTART_AFTER == 0
        self.held = None if is_first else (Held(**answer["before"]), Held(**answer["after"]))
        self._stints += 1
        if self._stints % RESTART_AFTER == 0:
            self._server.close(kill=True)
            self._server = self._start()
            counts["engines killed"] += 1
        return counts

    def close(self) -> None:
        """Ends the engine; its kept chunks are right and are dropped, and no file is left."""
        try:
            if self._is_serving and self._server.process.poll() is None:
                self.end()
            self._server.close()
            files = [file for file in find_kept() if file.name == self._name]
            assert [file.in_use for file in files] == [False], f"kept chunks: {files}"
        finally:
            self._server.process.kill()
            kept_path(self._name).unlink(missing_ok=True)
            self._folder.cleanup()


_serving: list[Serving] = []


def serving() -> Serving:
    """The one of this process, started when it is first asked for."""
    if not _serving:
        _serving.append(Serving())
        atexit.register(close)
    return _serving[0]


def close() -> None:
    while _serving:
        _serving.pop().close()


def vllm_round(seed: int, seconds: float) -> Counter[str]:
    """Ends what :meth:`Serving.begin` began before the other rounds, and judges it."""
    running = serving()
    running.begin(seed)
    until = time.monotonic() + seconds
    with pressure(seed):
        while ending.goes_on(until):
            time.sleep(0.05)
    return running.end()
