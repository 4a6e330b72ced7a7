"""A real Prometheus, from Debian's package or its own archive, that scrapes what it is told."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

Series = dict[str, Any]
"""``metric``, the labels, and ``value`` or ``values``: (seconds, text)."""

_START_S = 60


def is_there() -> bool:
    return shutil.which("prometheus") is not None


class RealPrometheus:
    """Scrapes ``targets`` (host:port) every ``every_s`` seconds until it is left."""

    def __init__(self, folder: Path, targets: Sequence[str], *, every_s: float) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        config = {
            "global": {
                "scrape_interval": f"{round(1000 * every_s)}ms",
                "scrape_timeout": f"{round(1000 * every_s)}ms",
            },
            "scrape_configs": [
                {"job_name": "cxl_offload", "static_configs": [{"targets": list(targets)}]}
            ],
        }
        file = folder / "prometheus.yml"
        file.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        self._log = folder / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={file}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> RealPrometheus:
        end = time.monotonic() + _START_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self._url}/-/ready", timeout=5).close()
            except OSError:
                time.sleep(0.1)
            else:
                return self
        self._stop()
        raise AssertionError(f"prometheus did not start: {self._log.read_text()}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def query(self, text: str) -> list[Series]:
        """What a query gives now."""
        return self._ask("query", query=text)

    def query_range(self, text: str, start: float, end: float, step: str) -> list[Series]:
        return self._ask("query_range", query=text, start=str(start), end=str(end), step=step)

    def _ask(self, what: str, **parameters: str) -> list[Series]:
        address = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                said = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters['query']}: {error.read().decode()}") from None
        assert said["status"] == "success", said
        assert not said.get("warnings"), said
        found: list[Series] = said["data"]["result"]
        return found
