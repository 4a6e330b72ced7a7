"""What the virtual machines are made of: QEMU, kernels and busybox, kept in a cache folder.

Nothing is installed: Debian packages are downloaded, unpacked below ``CXL_OFFLOAD_VM_CACHE`` (if
not set, ``$XDG_CACHE_HOME/cxl_offload/vm``) and used from there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.vm.harness.apt import Apt
from tests.vm.harness.errors import HarnessError
from tests.vm.harness.initrd import write_initrd
from tests.vm.harness.modules import MODULES, load_order

__all__ = ["KERNELS", "Assets", "cache_folder", "fetch", "find"]

_logger = logging.getLogger(__name__)

# Not the cloud flavour, which lacks 9p and CXL. 6.9 brought weighted interleave: 6.1 is without.
KERNELS = {
    "6.12": r"linux-image-6\.12\.[0-9]+\+deb12-amd64",
    "6.1": r"linux-image-6\.1\.0-[0-9]+-amd64",
}
# A cache of another layout is made anew.
_LAYOUT = 3
_QEMU = "usr/bin/qemu-system-x86_64"


@dataclass(frozen=True, slots=True)
class Assets:
    """The cache folder, once it is complete."""

    folder: Path

    @property
    def qemu(self) -> Path:
        return self.folder / "qemu" / _QEMU

    def qemu_command(self) -> list[str]:
        """QEMU with the places of its own firmware and modules."""
        root = self.folder / "qemu"
        data = [root / "usr/share/qemu", root / "usr/share/seabios", root / "usr/lib/ipxe/qemu"]
        return [str(self.qemu), *(word for place in data for word in ("-L", str(place)))]

    def qemu_environment(self) -> dict[str, str]:
        # Two folders: the packages were unpacked where /lib is no link to /usr/lib.
        places = [self.folder / "qemu" / name for name in ("usr/lib", "lib")]
        libraries = [place / "x86_64-linux-gnu" for place in places]
        return {
            "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
            "QEMU_MODULE_DIR": str(libraries[0] / "qemu"),
        }

    def vmlinuz(self, kernel: str) -> Path:
        return self.folder / f"kernel-{kernel}" / "vmlinuz"

    def modules(self, kernel: str) -> Path:
        return self.folder / f"kernel-{kernel}" / "modules"

    @property
    def busybox(self) -> Path:
        return self.folder / "busybox"

    def initrd(self, kernel: str) -> Path:
        """The initial RAM disk for that kernel, made when it is older than what goes into it."""
        target = self.folder / f"kernel-{kernel}" / "initrd"
        modules = sorted(self.modules(kernel).iterdir())
        write_initrd(target, busybox=self.busybox, modules=modules)
        return target


def cache_folder() -> Path:
    """``CXL_OFFLOAD_VM_CACHE``, or a folder of the user's cache."""
    chosen = os.environ.get("CXL_OFFLOAD_VM_CACHE")
    if chosen:
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "cxl_offload" / "vm"


def find() -> Assets | str:
    """The assets, or why there are none and what brings them."""
    folder = cache_folder()
    stamp = folder / "complete.json"
    if not stamp.exists():
        return f"no QEMU and no kernels in {folder}; `make test-vm` downloads them"
    if json.loads(stamp.read_text()).get("layout") != _LAYOUT:
        return f"{folder} was made by another version of the tests; `make test-vm` renews it"
    return Assets(folder)


def fetch() -> Assets:
    """The assets, downloaded first where they are missing (about 250 MB).

    Raises
    ------
    HarnessError
        In one line, with the command that failed and what it said. What was done stays unused,
        and the next call begins anew.
    """
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            found = find()
            if isinstance(found, Assets):
                return found
            _logger.info("downloading QEMU and two kernels into %s", folder)
            _fill(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        raise HarnessError(f"prepare the virtual machines in {folder}: {error}") from error
    return Assets(folder)


def _fill(folder: Path) -> None:
    apt = Apt(folder / "apt")
    apt.update()
    versions = {"qemu": _unpack_qemu(apt, folder)}
    _unpack_busybox(apt, folder)
    for kernel, pattern in KERNELS.items():
        versions[kernel] = _unpack_kernel(apt, folder, kernel, pattern)
    shutil.rmtree(folder / "apt")
    # Last, and at once: who finds it finds everything.
    unfinished = folder / "complete.json.new"
    unfinished.write_text(json.dumps({"layout": _LAYOUT, "versions": versions}, indent=1))
    unfinished.replace(folder / "complete.json")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _unpack(debs: list[Path], target: Path) -> None:
    for deb in debs:
        subprocess.run(["dpkg-deb", "--extract", str(deb), str(target)], check=True)


def _unpack_qemu(apt: Apt, folder: Path) -> str:
    target = folder / "qemu"
    shutil.rmtree(target, ignore_errors=True)
    # Its libraries are only those that this machine does not have already.
    _unpack(apt.download(apt.missing_with("qemu-system-x86")), target)
    assets = Assets(folder)
    done = subprocess.run(
        [*assets.qemu_command(), "--version"],
        env=os.environ | assets.qemu_environment(),
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise HarnessError(f"the downloaded QEMU does not start: {done.stderr.strip()}")
    return done.stdout.splitlines()[0]


def _unpack_busybox(apt: Apt, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        _unpack(apt.download(["busybox-static"]), Path(scratch))
        shutil.move(Path(scratch) / "bin/busybox", folder / "busybox")


def _unpack_kernel(apt: Apt, folder: Path, kernel: str, pattern: str) -> str:
    name = apt.newest(pattern)
    target = folder / f"kernel-{kernel}"
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        _unpack(apt.download([name]), Path(scratch))
        (tree,) = (Path(scratch) / "lib/modules").iterdir()
        (target / "modules").mkdir(parents=True)
        for index, (module, content) in enumerate(load_order(tree, MODULES)):
            (target / "modules" / f"{index:03}-{module}.ko").write_bytes(content)
        (image,) = (Path(scratch) / "boot").glob("vmlinuz-*")
        shutil.move(image, target / "vmlinuz")
    return name
