"""The harness itself, without booting: machines, archives, and what counts as a good run."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vm.harness import guest
from tests.vm.harness.errors import HarnessError
from tests.vm.harness.initrd import write_initrd
from tests.vm.harness.machine import MACHINES, load, names
from tests.vm.harness.packages import Assets, cache_folder, find
from tests.vm.harness.power import run_until
from tests.vm.harness.qemu import command_line

PASSED = '<testcase classname="m" name="good" time="1.5"/>'


def outcome(folder: Path, *, status: str | None, cases: str) -> guest.Outcome:
    (folder / "console.txt").write_text("the kernel said\nits last words\n")
    (folder / "junit.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    if status is not None:
        (folder / "status").write_text(status)
    return guest._read_outcome(folder, 1.0, 2.0, 3.0)


def test_run_in_which_everything_passed_is_good(tmp_path: Path) -> None:
    found = outcome(tmp_path, status="0\n", cases=PASSED)
    assert found.failures() == ""
    assert [(case.name, case.outcome, case.seconds) for case in found.cases] == [
        ("m::good", "passed", 1.5)
    ]


@pytest.mark.parametrize(
    ("status", "cases", "why"),
    [
        (None, PASSED, "its last words"),
        ("1", PASSED, "status was 1"),
        ("0", "", "after 0 tests"),
        ("0", PASSED + '<testcase name="s"><skipped message="no node 2"/></testcase>', "no node 2"),
        ("1", '<testcase name="f"><failure message="m">2 != 1</failure></testcase>', "2 != 1"),
        ("1", '<testcase name="e"><error message="leak"/></testcase>', "leak"),
    ],
    ids=["died", "status", "no-tests", "skipped", "failed", "error"],
)
def test_anything_else_is_not(tmp_path: Path, status: str | None, cases: str, why: str) -> None:
    assert why in outcome(tmp_path, status=status, cases=cases).failures()


@pytest.mark.parametrize("name", names())
def test_qemu_gets_every_node_and_cpu_of_the_machine(name: str, tmp_path: Path) -> None:
    spec = load(name)
    (tmp_path / f"kernel-{spec.kernel}/modules").mkdir(parents=True)
    (tmp_path / "busybox").write_bytes(b"")
    words = command_line(spec, Assets(tmp_path), tmp_path / "results")
    numa = " ".join(word for word in words if word.startswith("node,"))
    assert re.findall(r"nodeid=(\d+)", numa) == [str(node.id) for node in spec.boot_nodes]
    assert len(re.findall(r"cpus=\d+", numa)) == spec.cpus
    assert ("cxl-type3" in " ".join(words)) == (spec.cxl is not None)
    for argument in spec.tests:
        file = argument.removeprefix("--deselect=").partition("::")[0]
        assert (guest.REPOSITORY / file).exists(), f"{name}.yaml runs {file}, which is not there"


def test_machine_that_is_not_there_is_named() -> None:
    with pytest.raises(HarnessError, match=r"no machine 'moon'; there are .*cxl-movable"):
        load("moon")


def test_memory_that_linux_cannot_take_online_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (MACHINES / "cxl-kernel.yaml").read_text().replace("memory_mib: 256", "memory_mib: 200")
    (tmp_path / "odd.yaml").write_text(text)
    monkeypatch.setattr("tests.vm.harness.machine.MACHINES", tmp_path)
    with pytest.raises(HarnessError, match="blocks of 128 MiB"):
        load("odd")


def test_initial_disk_is_an_archive_that_cpio_reads(tmp_path: Path) -> None:
    busybox, module = tmp_path / "busybox", tmp_path / "000-a.ko"
    busybox.write_bytes(b"\x7fELF" * 3)
    module.write_bytes(b"module")
    write_initrd(tmp_path / "initrd", busybox=busybox, modules=[module])
    archive = gzip.decompress((tmp_path / "initrd").read_bytes())
    names_in_archive = re.findall(rb"070701[0-9A-F]{104}([^\0]+)\0", archive)
    assert {b"init", b"bin/busybox", b"bin/sh", b"modules/000-a.ko", b"TRAILER!!!"} <= set(
        names_in_archive
    )
    assert archive.count(b"module") >= 2


def test_cache_without_packages_says_what_brings_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXL_OFFLOAD_VM_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    reason = find()
    assert isinstance(reason, str)
    assert str(tmp_path) in reason
    assert "make test-vm" in reason
    (tmp_path / "complete.json").write_text('{"layout": 0}')
    assert "another version" in str(find())


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ("", "boots virtual machines for minutes: make test-vm"),
        ("CXL_OFFLOAD_VM", "no QEMU and no kernels in"),
        ("CXL_OFFLOAD_REQUIRE_VM", "no QEMU and no kernels in"),
    ],
    ids=["plain", "wanted", "required"],
)
def test_missing_packages_skip_or_fail(tmp_path: Path, wanted: str, reason: str) -> None:
    """CI sets CXL_OFFLOAD_REQUIRE_VM, so that nothing is skipped there unseen."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("CXL_OFFLOAD_")
    }
    environment["CXL_OFFLOAD_VM_CACHE"] = str(tmp_path)
    environment |= {wanted: "1"} if wanted else {}
    required = wanted == "CXL_OFFLOAD_REQUIRE_VM"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-rs",
            "-p",
            "no:cacheprovider",
            "tests/vm/test_guests.py",
        ],
        cwd=guest.REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == (1 if required else 0)
    assert str(len(names())) + (" failed" if required else " skipped") in done.stdout
    assert reason in done.stdout


def fetch_with(apt_get: str | None, folder: Path) -> subprocess.CompletedProcess[str]:
    """Into an empty cache, on a machine with this apt-get, or without one."""
    programs = folder / "bin"
    programs.mkdir()
    if apt_get is not None:
        (programs / "apt-get").write_text(f"#!/bin/sh\n{apt_get}\n")
        (programs / "apt-get").chmod(0o755)
    return subprocess.run(
        [sys.executable, "-m", "tests.vm.harness", "fetch"],
        cwd=guest.REPOSITORY,
        env=os.environ | {"CXL_OFFLOAD_VM_CACHE": str(folder / "cache"), "PATH": str(programs)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("apt_get", "reason"),
    [
        (None, "this machine has no apt"),
        ("exit 0", "apt is not set up for Debian bookworm"),
        ("echo 'W: slow' >&2; echo 'E: no such host' >&2; exit 100", "E: no such host"),
    ],
    ids=["no-apt", "other-release", "no-network"],
)
def test_what_cannot_be_fetched_is_said_in_one_line(
    tmp_path: Path, apt_get: str | None, reason: str
) -> None:
    for _ in range(2):
        done = fetch_with(apt_get, tmp_path)
        assert done.returncode == 125
        (line,) = done.stderr.splitlines()[1:]  # after what it set out to do
        assert line.startswith("vm: ")
        assert reason in line
        (tmp_path / "bin" / "apt-get").unlink(missing_ok=True)
        (tmp_path / "bin").rmdir()
    assert "no QEMU and no kernels" in str(find_in(tmp_path / "cache"))


def find_in(folder: Path) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXL_OFFLOAD_VM_CACHE", str(folder))
        return find()


GUEST = """
date >> {folder}/boots
if [ $(wc -l < {folder}/boots) -gt {hangs} ]; then
    : > {results}/started
    echo "power: opened"
fi
exec sleep 60
"""


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[str]]:
    """Cuts the power of a guest whose emulator hangs so many times before it says anything."""
    monkeypatch.setattr("tests.vm.harness.power.BOOT_TIMEOUT_S", 1.0)

    def cut_after(hangs: int) -> list[str]:
        def emulator(_spec: object, _assets: object, results: Path, _media: object) -> list[str]:
            return ["sh", "-c", GUEST.format(folder=tmp_path, results=results, hangs=hangs)]

        monkeypatch.setattr("tests.vm.harness.power.command_line", emulator)
        machine = load("two-sockets-memory-node")
        return run_until(
            lambda said: said == "opened", machine, Assets(tmp_path), (), ["true"], timeout_s=10.0
        )

    return cut_after


def test_guest_that_does_not_come_up_is_started_anew(
    hanging: Callable[[int], list[str]], tmp_path: Path
) -> None:
    assert hanging(1) == ["opened"]
    assert len((tmp_path / "boots").read_text().splitlines()) == 2


def test_guest_that_never_comes_up_is_an_error(hanging: Callable[[int], list[str]]) -> None:
    with pytest.raises(HarnessError, match="did not come up in 3 attempts"):
        hanging(9)


@pytest.mark.parametrize(("given", "patience"), [(None, "10"), ("3", "30"), ("1.5", "15")])
def test_guest_is_ten_times_as_patient_as_its_host(
    given: str | None, patience: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXL_OFFLOAD_TEST_PATIENCE", raising=False)
    if given is not None:
        monkeypatch.setenv("CXL_OFFLOAD_TEST_PATIENCE", given)
    text = guest.job_text(load("cxl-kernel"), ["true"])
    assert f"export CXL_OFFLOAD_TEST_PATIENCE={patience}\n" in text
