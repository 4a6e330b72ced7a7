"""A Python of another Debian, unpacked into a folder; nothing is installed on this machine."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

SUITES = {"3.11": "bookworm", "3.13": "trixie", "3.14": "sid"}
"""Where Debian has which Python."""
ARCHITECTURES = {"aarch64": "arm64", "x86_64": "amd64"}
"""Debian's names of processors."""


class CannotBuildError(Exception):
    """One line for the user: what is missing, and what to do."""


@dataclass(frozen=True, slots=True)
class Python:
    """An interpreter below a root of its own, with its libraries and headers."""

    version: str
    processor: str
    root: Path

    @property
    def program(self) -> Path:
        return self.root / "usr" / "bin" / f"python{self.version}"

    @property
    def headers(self) -> Path:
        return self.root / "usr" / "include" / f"python{self.version}"

    @property
    def library_folders(self) -> list[Path]:
        """The C library's among them."""
        both = (self.root / "usr" / "lib", self.root / "lib")
        return [folder / f"{self.processor}-linux-gnu" for folder in both]


def archive_of_this_machine() -> str:
    """Debian's archive where this machine has it from."""
    words = ["apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotBuildError(f"apt-get is asked for Debian's archive: {error}") from error
    for line in done.stdout.splitlines():
        label, _, address = line.partition(" ")
        if label == "Debian":
            return address
    raise CannotBuildError(
        "apt-get knows no archive of Debian; give its address by --archive, or run apt-get update"
    )


def apt(folder: Path, architecture: str) -> list[str]:
    """``apt-get`` that knows one source and no installed package, and writes below ``folder``."""
    options = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Dir::Cache": folder / "cache",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State": folder / "state",
        "Dir::State::status": folder / "status",
    }
    return ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]


def unpack_python(version: str, processor: str, folder: Path, *, archive: str | None) -> Python:
    """Downloads and unpacks, unless ``folder`` has it from an earlier run.

    Raises
    ------
    CannotBuildError
        No suite of Debian is known to have this Python, or its archive is not reachable.
    """
    if version not in SUITES:
        raise CannotBuildError(f"Python {version}: Debian has it for {', '.join(SUITES)} only")
    python = Python(version, processor, folder / "root")
    if (folder / "unpacked").exists():
        return python
    packages = folder / "cache" / "archives"
    for path in (packages / "partial", folder / "state" / "lists" / "partial", python.root):
        path.mkdir(parents=True, exist_ok=True)
    (folder / "status").touch()
    source = f"deb {archive or archive_of_this_machine()} {SUITES[version]} main\n"
    (folder / "sources.list").write_text(source)
    command = apt(folder, ARCHITECTURES[processor])
    wanted = (f"python{version}", f"libpython{version}-stdlib", "libstdc++6")
    try:
        subprocess.run([*command, "update"], check=True)
        options = ("--yes", "--no-install-recommends", "--download-only")
        subprocess.run([*command, *options, "install", *wanted], check=True)
        # Alone: the C library's headers have to be those of the compiler.
        subprocess.run([*command, "download", f"libpython{version}-dev"], cwd=packages, check=True)
        for package in sorted(packages.glob("*.deb")):
            subprocess.run(["dpkg-deb", "--extract", package, python.root], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotBuildError(f"Python {version} from {source.strip()}: {error}") from error
    for name in ("lib", "lib64"):  # what Debian's base-files makes where /usr is merged
        if (python.root / "usr" / name).is_dir() and not (python.root / name).exists():
            (python.root / name).symlink_to(Path("usr") / name)
    (folder / "unpacked").touch()
    return python
