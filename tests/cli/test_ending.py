"""SIGTERM ends a command as Ctrl-C does: one line, a status of its own, nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cxl_offload.cli import topology
from cxl_offload.cli.main import main

ROOT = Path(__file__).parents[2]
SAID = "cxl-offload: ended by SIGTERM\n"


def terminated(*given: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def status_of(*words: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code


def test_sigterm_is_one_line_and_its_own_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cxl_offload.cli.topology.discover", terminated)
    assert status_of("topology") == 143
    assert capsys.readouterr() == ("", SAID)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_handler_of_somebody_else_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    whole = topology.discover
    monkeypatch.setattr(topology, "discover", lambda *given: (terminated(), whole(*given))[1])
    try:
        assert status_of("topology") == 0
        terminated()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM] * 2


def test_command_in_another_thread_leaves_the_signal_alone() -> None:
    codes: list[object] = []
    other = threading.Thread(target=lambda: codes.append(status_of("--version")))
    other.start()
    other.join()
    assert codes == [0]


@pytest.mark.parametrize("code", ["{}", "exec({!r})"])
def test_sigterm_while_modules_are_loaded_is_one_line(tmp_path: Path, code: str) -> None:
    """The console script's function, with a typer whose loading is ended."""
    script = re.search(r'^cxl-offload = "(.+):(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert script is not None
    module, function = script.groups()
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    (tmp_path / "typer.py").write_text(code.format(kill))
    done = _python(f"from {module} import {function}; {function}()", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", SAID)


TWICE = """
import os, signal
from cxl_offload.cli import main, topology
def stubborn(*_):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        print("went on", flush=True)
topology.discover = stubborn
main.main(["topology"])
"""


def test_second_sigterm_ends_what_takes_long_to_end(tmp_path: Path) -> None:
    done = _python(TWICE, tmp_path)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")


def test_ranks_of_torchrun_die_of_it_at_once(tmp_path: Path) -> None:
    assert _python(TWICE, tmp_path, RANK="0").returncode == -signal.SIGTERM
    once = TWICE.replace(
        "finally:", "except KeyboardInterrupt:\n        print('was told', flush=True)\n    else:"
    )
    assert "was told" in _python(once, tmp_path).stdout
    assert "was told" not in _python(once, tmp_path, RANK="0").stdout


def _python(code: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", **more},
        capture_output=True,
        text=True,
        check=False,
    )
