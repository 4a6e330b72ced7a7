"""Boots a machine, runs pytest in it, and brings back what came of it."""

from __future__ import annotations

import logging
import os
import resource
import shlex
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.vm.harness.errors import HarnessError
from tests.vm.harness.machine import MachineSpec
from tests.vm.harness.packages import Assets
from tests.vm.harness.qemu import command_line

__all__ = [
    "BOOT_ATTEMPTS",
    "BOOT_TIMEOUT_S",
    "STARTED",
    "Case",
    "Outcome",
    "job_text",
    "run_pytest",
]

_logger = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parents[3]

BOOT_TIMEOUT_S = 90.0
"""Emulated guests hang before their first line now and then: one that is not up is started anew."""
BOOT_ATTEMPTS = 3
STARTED = "started"
"""A file that the guest's job makes in the folder of results before it does anything else."""

_EMULATION = 10.0
"""How many times the host's patience a guest's tests have: every instruction is emulated."""

# Runs as the guest's only job, with the host's files as its root and `results` at /mnt.
_JOB = """\
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/run/tmp TMPDIR=/run/tmp LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1
export CXL_OFFLOAD_TEST_MACHINE={machine} PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
export CXL_OFFLOAD_TEST_PATIENCE={patience:g}
: > /mnt/{started}
cd {repository} && {bring_up} && {job}
echo $? > /mnt/status
sync
echo o > /proc/sysrq-trigger
sleep 60
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One test of the guest. ``outcome``: passed, failed (errors too) or skipped."""

    name: str
    outcome: str
    text: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a guest brought back.

    ``status`` is pytest's exit status, None when the guest died, hung or was cut off before it
    could say. ``cases`` is then empty, and the end of ``console`` shows how far it came. Seconds of
    wall clock until the tests began and until the guest ended, and of CPU that QEMU took.
    """

    status: int | None
    cases: tuple[Case, ...]
    console: Path
    junit: Path
    boot_s: float
    total_s: float
    cpu_s: float

    @property
    def times(self) -> tuple[float, float, float]:
        return self.boot_s, self.total_s, self.cpu_s

    def failures(self) -> str:
        """All that keeps this run from counting as good, in words; empty when it does."""
        if self.status is None:
            tail = "\n".join(self.console.read_text(errors="replace").splitlines()[-40:])
            return f"the guest ended without a result; the end of {self.console}:\n{tail}"
        bad = [f"{case.outcome}: {case.name}\n{case.text}" for case in self.cases if case.text]
        if bad or self.status != 0 or not self.cases:
            bad.append(f"pytest's exit status was {self.status}, after {len(self.cases)} tests")
        return "\n\n".join(bad)


def run_pytest(
    spec: MachineSpec,
    assets: Assets,
    selection: Sequence[str],
    *,
    results: Path,
    timeout_s: float,
) -> Outcome:
    """Boots ``spec`` and runs ``pytest SELECTION`` in it as root.

    Parameters
    ----------
    selection
        Arguments of pytest, relative to the repository.
    results
        Folder for console, JUnit XML and whatever the tests leave in /mnt; emptied first.
    timeout_s
        Of one boot with its tests. A guest that is not up after 90 s is started anew, twice.

    Raises
    ------
    HarnessError
        The guest never came up.
    """
    for attempt in range(1, BOOT_ATTEMPTS + 1):
        shutil.rmtree(results, ignore_errors=True)
        results.mkdir(parents=True)
        (results / "job.sh").write_text(job_text(spec, _pytest(selection)))
        before_s = _cpu_s()
        boot_s, total_s = _boot(spec, assets, results, timeout_s)
        if boot_s is not None:
            return _read_outcome(results, boot_s, total_s, _cpu_s() - before_s)
        _logger.warning("%s did not come up (attempt %d)", spec.name, attempt)
    raise HarnessError(
        f"{spec.name} did not come up in {BOOT_ATTEMPTS} attempts; see {results}/console.txt"
    )


def _pytest(selection: Sequence[str]) -> list[str]:
    pytest = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    pytest += ["--junitxml=/mnt/junit.xml", "-p", "pytest_timeout"]
    return [*pytest, "-o", "faulthandler_timeout=100", *selection]


def job_text(spec: MachineSpec, command: Sequence[str]) -> str:
    """The script that a guest runs, from the repository's folder, before it ends."""
    bring_up = [sys.executable, "-m", "tests.vm.harness.cxl_region"] if spec.cxl else ["true"]
    return _JOB.format(
        machine=shlex.quote(spec.name),
        started=STARTED,
        patience=_EMULATION * float(os.environ.get("CXL_OFFLOAD_TEST_PATIENCE", "1")),
        repository=shlex.quote(str(REPOSITORY)),
        bring_up=shlex.join(bring_up),
        job=shlex.join(command),
    )


def _boot(
    spec: MachineSpec, assets: Assets, results: Path, timeout_s: float
) -> tuple[float | None, float]:
    """Seconds until the guest's job started (None: it never did), and until the guest ended."""
    # A guest must not outlive the run that waits for it, however that ends.
    command = ["setpriv", "--pdeathsig", "KILL", *command_line(spec, assets, results)]
    environment = os.environ | assets.qemu_environment()
    begin = time.monotonic()
    up_s: float | None = None
    with (results / "console.txt").open("wb") as console:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                spent = time.monotonic() - begin
                if up_s is None and (results / STARTED).exists():
                    up_s = spent
                if spent > (BOOT_TIMEOUT_S if up_s is None else timeout_s):
                    break
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
    if up_s is None and (results / STARTED).exists():
        up_s = time.monotonic() - begin
    return up_s, time.monotonic() - begin


def _cpu_s() -> float:
    """Of all processes that this one has started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _read_outcome(results: Path, boot_s: float, total_s: float, cpu_s: float) -> Outcome:
    status = results / "status"
    junit = results / "junit.xml"
    text = status.read_text().strip() if status.exists() else ""
    return Outcome(
        status=int(text) if text else None,
        cases=_cases(junit) if junit.exists() else (),
        console=results / "console.txt",
        junit=junit,
        boot_s=boot_s,
        total_s=total_s,
        cpu_s=cpu_s,
    )


def _cases(junit: Path) -> tuple[Case, ...]:
    cases = []
    for element in ET.parse(junit).iter("testcase"):
        problem = next((child for child in element if child.tag in _OUTCOMES), None)
        cases.append(
            Case(
                name=f"{element.get('classname')}::{element.get('name')}",
                outcome="passed" if problem is None else _OUTCOMES[problem.tag],
                text="" if problem is None else (problem.text or problem.get("message") or "?"),
                seconds=float(element.get("time") or 0),
            )
        )
    return tuple(cases)


_OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}
