"""Builds the extension with g++ alone; with nvcc at hand also the optional CUDA kernels.

No torch is needed: the core knows no torch headers, so one build serves every torch version.
Environment: ``CXL_OFFLOAD_BUILD_JOBS`` (parallel compilers), ``CXL_OFFLOAD_NVCC`` (path of nvcc;
empty: do not build the CUDA kernels), ``CXL_OFFLOAD_CUDA_ARCHS`` (e.g. ``80;90``),
``CXL_OFFLOAD_SANITIZE`` (e.g. ``address,undefined``).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
CUDA_LIBRARY = "libcxl_offload_cuda.so"

ParallelCompile("CXL_OFFLOAD_BUILD_JOBS", default=os.cpu_count() or 1).install()


def relative_sources(*patterns: str) -> list[str]:
    found = (path for pattern in patterns for path in (ROOT / "csrc").glob(pattern))
    return sorted(str(path.relative_to(ROOT)) for path in found)


JOINED = {
    "bindings": 2,
    "core": 1,
    "gpu": 1,
    "kernels": 1,
    "memory": 1,
    "os": 1,
    "probe": 1,
    "replay": 1,
    "transfer": 1,
}
# These stay apart: each is compiled for an instruction set of its own.
APART = ("_scalar", "_neon", "_sve256", "_avx2", "_avx512", "_amx")


def stays_apart(source: str) -> bool:
    return Path(source).stem.endswith(APART)


def joined_sources() -> list[str]:
    """Few sources that include the many: headers are most of what a compiler reads.

    A folder becomes one unit, and the bindings two, since pybind11 takes most of the time and
    there are commonly two compilers or more at work. An installation takes a third of the time.
    """
    folder = ROOT / "build" / "joined"
    folder.mkdir(parents=True, exist_ok=True)
    joined = []
    for part, units in JOINED.items():
        sources = [path for path in relative_sources(f"{part}/*.cc") if not stays_apart(path)]
        for at in range(units):
            names = [Path(source).relative_to("csrc") for source in sources[at::units]]
            text = "".join(f'#include "{name}"\n' for name in names)
            if part == "bindings":  # they convert arguments; nothing in them is worth more time
                text = f'#pragma GCC optimize("O1")\n{text}'
            path = folder / f"{part}_{at}.cc"
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
            joined.append(str(path.relative_to(ROOT)))
    every = relative_sources("*/*.cc")
    rest = [p for p in every if stays_apart(p) or Path(p).parent.name not in JOINED]
    return joined + rest


def find_nvcc() -> str | None:
    chosen = os.environ.get("CXL_OFFLOAD_NVCC")
    if chosen is not None:
        return chosen or None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.path.join(home, "bin"))


class BuildAnew(build_py):
    """``build_py`` without what an earlier build left: a module since removed, a library.

    All that lies in its folder gets into a wheel. The extension stays: ``build_ext`` finds out
    itself whether it is of these sources.
    """

    def run(self) -> None:
        if not self.editable_mode:
            for path in (Path(self.build_lib) / "cxl_offload").rglob("*"):
                if path.is_file() and not path.name.startswith("_C."):
                    path.unlink()
        super().run()


def processor_of(library: Path) -> bytes:
    """``e_machine`` of an ELF file."""
    return library.read_bytes()[18:20]


# Every source gets these where the compiler can make SVE with vectors of 256 bits; the file says
# what is asked and why it may be every source.
SVE256 = ["-msve-vector-bits=256", "-DCXL_OFFLOAD_SVE256=1"]
SVE256_CHECK = "csrc/kernels/vector/sve256_check.cc"


def makes_sve256(compiler: list[str]) -> bool:
    words = [*compiler, *SVE256, "-std=c++20", "-Icsrc", "-fsyntax-only", SVE256_CHECK]
    return subprocess.run(words, cwd=ROOT, capture_output=True, check=False).returncode == 0


class BuildWithCuda(build_ext):
    """``build_ext``, and the CUDA kernels into a library of their own that may be missing."""

    def build_extensions(self) -> None:
        compiler = getattr(self.compiler, "compiler_so_cxx", self.compiler.compiler_so)
        if makes_sve256(compiler):
            for extension in self.extensions:
                extension.extra_compile_args += SVE256
        super().build_extensions()

    def run(self) -> None:
        super().run()
        sources = relative_sources("gpu/*.cu")
        nvcc = find_nvcc()
        if not sources:
            raise SystemExit("cxl_offload: csrc/gpu has no CUDA kernels; this source is incomplete")
        if nvcc is None:
            print("cxl_offload: no nvcc found; built without the CUDA kernels")
            return
        extension = Path(self.get_ext_fullpath("cxl_offload._C"))
        library = extension.with_name(CUDA_LIBRARY)
        archs = os.environ.get("CXL_OFFLOAD_CUDA_ARCHS", "80;90").split(";")
        code = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        code.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
        command = [nvcc, "-O3", "-std=c++20", "--shared", "-cudart", "static", "-Icsrc"]
        command += ["-Xcompiler", "-fPIC,-fvisibility=hidden", *code]
        command += ["-o", str(library), *sources]
        subprocess.run(command, cwd=ROOT, check=True)
        if processor_of(library) != processor_of(extension):
            library.unlink()
            raise SystemExit(
                f"cxl_offload: {nvcc} built the CUDA kernels for another processor than the "
                "extension's; name the compiler and the CUDA libraries of that processor in "
                "NVCC_PREPEND_FLAGS (-ccbin, -L, -I), or leave the kernels out: CXL_OFFLOAD_NVCC="
            )
        print(f"cxl_offload: built the CUDA kernels with {nvcc} for sm {', '.join(archs)}")


def compile_flags() -> tuple[list[str], list[str]]:
    flags = ["-O2", "-Wall", "-Wextra", "-Wno-subobject-linkage", "-fvisibility=hidden"]
    sanitize = os.environ.get("CXL_OFFLOAD_SANITIZE")
    if sanitize is None:
        return [*flags, "-g0"], ["-s"]
    extra = [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-g"]
    return flags + extra, extra


CXX_FLAGS, LINK_FLAGS = compile_flags()


def long_description() -> str:
    """The README for a package index, where links into the source tree lead nowhere."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^]]*)\]\((?!https?:)([^)#]*)[^)]*\)", r"\1 (`\2`)", text)


setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    packages=[*find_packages(include=["cxl_offload", "cxl_offload.*"]), "cxl_offload.configs"],
    package_dir={"cxl_offload.configs": "configs"},
    package_data={
        "cxl_offload": ["py.typed", "_C.pyi"],
        "cxl_offload.configs": ["*/*.yaml", "grafana/*/*"],
        "cxl_offload.validation": ["cases/*.json"],
    },
    ext_modules=[
        Pybind11Extension(
            "cxl_offload._C",
            joined_sources(),
            include_dirs=["csrc"],
            # The joined sources only include the many, so a change in one of those would be missed.
            depends=relative_sources("*/*.cc", "*/*.h", "*/*/*.h"),
            cxx_std=20,
            extra_compile_args=CXX_FLAGS,
            extra_link_args=[*LINK_FLAGS, "-ldl", "-pthread"],
        )
    ],
    cmdclass={"build_ext": BuildWithCuda, "build_py": BuildAnew},
)
