"""apt with folders of its own: packages are downloaded and unpacked, never installed."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.vm.harness.errors import HarnessError

__all__ = ["Apt"]

_RELEASE = "bookworm"
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class Apt:
    """The machine's own mirror, with the backports suite added.

    Parameters
    ----------
    folder
        Where lists and downloads are kept; nothing outside it is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.downloads = folder / "downloads"

    def update(self) -> None:
        """Reads the lists of Debian and its backports from the mirror that apt is set up with."""
        if shutil.which("apt-get") is None or platform.machine() != "x86_64":
            raise HarnessError(
                f"the virtual machines are made of Debian {_RELEASE} packages for x86_64; "
                "this machine has no apt, or another processor"
            )
        for name in ("lists/partial", "archives/partial", "parts", "downloads"):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        mirror = self._mirror()
        signed = f"[signed-by={_KEYRING}] " if _KEYRING.exists() else ""
        suites = (_RELEASE, f"{_RELEASE}-updates", f"{_RELEASE}-backports")
        lines = [f"deb {signed}{mirror} {suite} main\n" for suite in suites]
        (self._folder / "sources.list").write_text("".join(lines))
        self._run("apt-get", "update", "-qq")

    def newest(self, pattern: str) -> str:
        """The name of the newest package whose whole name matches ``pattern``."""
        prefix = re.match(r"[a-z0-9-]*", pattern)
        names = self._run("apt-cache", "pkgnames", prefix.group() if prefix else "").split()
        found = [name for name in names if re.fullmatch(pattern, name)]
        if not found:
            raise HarnessError(f"the Debian mirror has no package {pattern}")
        return max(found, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])

    def missing_with(self, package: str) -> list[str]:
        """``package`` from backports and what it needs and this machine lacks, as name=version."""
        text = self._run(
            "apt-get",
            *("install", "--simulate", "--no-install-recommends", "--reinstall"),
            *("--target-release", f"{_RELEASE}-backports", package),
        )
        installs = re.findall(r"(?m)^Inst (\S+) (?:\[\S+\] )?\((\S+)", text)
        return [f"{name}={version}" for name, version in installs]

    def download(self, packages: Sequence[str]) -> list[Path]:
        """The .deb files of these packages; those downloaded before are not fetched again."""
        listed = self._run("apt-get", "download", "--print-uris", *packages)
        self._run("apt-get", "download", "-qq", *packages, folder=self.downloads)
        names = re.findall(r"(?m)^'\S+' (\S+\.deb) ", listed)
        return [self.downloads / name for name in names]

    def _mirror(self) -> str:
        """The address of Debian's main archive in apt's own configuration."""
        uris = _checked(
            ["apt-get", "update", "--print-uris", "-o", f"Dir::State::lists={self._folder}/lists"]
        )
        for uri, suite in re.findall(r"(?m)^'(\S+)/dists/(\S+)/InRelease'", uris):
            if suite == _RELEASE:
                return str(uri)
        raise HarnessError(
            f"apt is not set up for Debian {_RELEASE}, whose packages the virtual machines are "
            "made of"
        )

    def _run(self, command: str, *arguments: str, folder: Path | None = None) -> str:
        options = {
            "Dir::Etc::sourcelist": self._folder / "sources.list",
            "Dir::Etc::sourceparts": self._folder / "parts",
            "Dir::State::lists": self._folder / "lists",
            "Dir::Cache::archives": self._folder / "archives",
            "Dir::Cache::pkgcache": "",
            "Dir::Cache::srcpkgcache": "",
            "APT::Sandbox::User": "",
            "Acquire::Retries": "3",
            "Debug::NoLocking": "true",
        }
        flags = [flag for name, value in options.items() for flag in ("-o", f"{name}={value}")]
        return _checked([command, *flags, *arguments], folder=folder)


def _checked(command: Iterable[str], *, folder: Path | None = None) -> str:
    words = list(command)
    environment = os.environ | {"LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        plain = [word for word in words if word != "-o" and "::" not in word]
        said = "; ".join(line for line in done.stderr.splitlines() if line.startswith("E:"))
        raise HarnessError(f"{' '.join(plain)}: {said or done.stderr.strip()[-500:]}")
    return done.stdout
