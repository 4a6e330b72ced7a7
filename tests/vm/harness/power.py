"""Persistent memory that outlives its guest, and guests whose power is cut."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.vm.harness.errors import HarnessError
from tests.vm.harness.guest import BOOT_ATTEMPTS, BOOT_TIMEOUT_S, STARTED, job_text
from tests.vm.harness.machine import MIB, MachineSpec
from tests.vm.harness.packages import Assets
from tests.vm.harness.qemu import command_line

__all__ = ["make_medium", "run_until"]

SAID = "power: "
"""Lines of the guest's program on the console begin with this."""


def make_medium(path: Path, nbytes: int = 128 * MIB) -> None:
    """A file of zeros, which takes no room yet."""
    with path.open("wb") as file:
        file.truncate(nbytes)


def run_until(
    cut: Callable[[str], bool],
    spec: MachineSpec,
    assets: Assets,
    media: Sequence[Path],
    command: Sequence[str],
    *,
    timeout_s: float,
) -> list[str]:
    """Boots a guest that runs a command, and kills QEMU where ``cut`` says so.

    Nothing of the guest's own memory is left then; its persistent memory is as it stood.

    Parameters
    ----------
    cut
        Is asked for each line that the guest's program says.
    media
        Files that are its persistent memory.

    Returns
    -------
    list of str
        What it said, also between the cut and its end.

    Raises
    ------
    HarnessError
        It ended by itself, or did not come to the cut within ``timeout_s``, with the end of the
        console; or it never came up, and was started anew as often as any guest is. A guest that
        is not up has not touched its media.
    """
    for _ in range(BOOT_ATTEMPTS):
        said = _boot_until(cut, spec, assets, media, command, timeout_s)
        if said is not None:
            return said
    raise HarnessError(f"{spec.name} did not come up in {BOOT_ATTEMPTS} attempts")


def _boot_until(
    cut: Callable[[str], bool],
    spec: MachineSpec,
    assets: Assets,
    media: Sequence[Path],
    command: Sequence[str],
    timeout_s: float,
) -> list[str] | None:
    """What the guest said; None where it never came up."""
    with tempfile.TemporaryDirectory() as results:
        (Path(results) / "job.sh").write_text(job_text(spec, command))
        # A guest must not outlive the run that waits for it, however that ends.
        words = ["setpriv", "--pdeathsig", "KILL"]
        words += command_line(spec, assets, Path(results), media)
        process = subprocess.Popen(
            words,
            env=os.environ | assets.qemu_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            if not _came_up(process, Path(results) / STARTED):
                return None
            return _listen(process, cut, time.monotonic() + timeout_s)
        finally:
            process.kill()
            process.wait()


def _came_up(process: subprocess.Popen[bytes], started: Path) -> bool:
    give_up = time.monotonic() + BOOT_TIMEOUT_S
    while process.poll() is None and not started.exists():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.1)
    return True  # one that ended by itself is told with its console


def _listen(
    process: subprocess.Popen[bytes], cut: Callable[[str], bool], give_up: float
) -> list[str]:
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    console, said, rest, is_cut = bytearray(), list[str](), b"", False
    while True:
        some = process.stdout.read()
        if some == b"" and is_cut:
            return said
        if some == b"" or time.monotonic() > give_up:
            how = "did not come to its cut" if some is None else "ended by itself"
            tail = bytes(console[-3000:]).decode(errors="replace")
            raise HarnessError(f"a guest {how}; its console:\n{tail}")
        if some is None:
            time.sleep(0.005)
            continue
        console += some
        *lines, rest = (rest + some).split(b"\n")
        for line in lines:
            _, known, text = line.decode(errors="replace").strip().partition(SAID)
            if known:
                said.append(text)
                if not is_cut and cut(text):
                    process.kill()
                    is_cut = True
