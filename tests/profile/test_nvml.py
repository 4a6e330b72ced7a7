"""Memory of GPUs by a stand-in for NVIDIA's management library, which every host can load."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from cxl_offload.profile.measure.nvml import memory_bytes

SOURCE = """
#include <string.h>
typedef struct { unsigned long long total, free, used; } Memory;
static int running;
int nvmlInit_v2(void) { running += 1; return START; }
int nvmlShutdown(void) { running -= 1; return 0; }
int runs(void) { return running; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* address, void** device) {
  static int known;
  if (!running || strcmp(address, "0000:3b:00.0") != 0) return 6;  /* not found */
  *device = &known;
  return 0;
}
int nvmlDeviceGetMemoryInfo(void* device, Memory* memory) {
  memory->total = 85899345920ULL;
  memory->free = 1;
  memory->used = 2;
  return device ? 0 : 2;
}
"""


def library(folder: Path, *, start: int = 0) -> str:
    compiler = shutil.which("cc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C compiler")
    source, made = folder / "nvml.c", folder / f"libnvml{start}.so"
    source.write_text(SOURCE, encoding="utf-8")
    command = [compiler, "-shared", "-fPIC", f"-DSTART={start}", "-x", "c", str(source)]
    subprocess.run([*command, "-o", str(made)], check=True, timeout=600)
    return str(made)


def test_memory_is_that_of_the_gpus_that_the_library_knows(tmp_path: Path) -> None:
    found = memory_bytes(["0000:3b:00.0", "0000:af:00.0"], library=library(tmp_path))
    assert found == {"0000:3b:00.0": 80 << 30}


def test_library_is_closed_as_often_as_it_was_started(tmp_path: Path) -> None:
    import ctypes

    path = library(tmp_path)
    memory_bytes(["0000:3b:00.0"], library=path)
    assert ctypes.CDLL(path).runs() == 0


def test_nothing_is_known_without_the_library_or_where_it_does_not_start(tmp_path: Path) -> None:
    address = ["0000:3b:00.0"]
    assert memory_bytes(address, library="libnvidia_that_is_not_there.so.1") == {}
    assert memory_bytes(address, library=library(tmp_path, start=9)) == {}
    assert memory_bytes(address, library="libm.so.6") == {}
