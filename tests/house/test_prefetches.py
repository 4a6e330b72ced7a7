"""Prefetches reach the machine code: a compiler drops calls of functions that do nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from .sources import PACKAGE

CSRC = PACKAGE.parent / "csrc"
HEADER = CSRC / "core" / "prefetch.h"

LOOP = """
#include "core/prefetch.h"

namespace {

// As where a function is too large to be inlined before the compiler asks what functions do.
__attribute__((noinline)) void prefetch_row(const char* row, unsigned long bytes) {
  for (unsigned long at = 0; at < bytes; at += 64) cxl_offload::PREFETCH(row + at);
}

}  // namespace

void prefetch_rows(const char* const* rows, unsigned long bytes) {
  for (int i = 0; i < 9; ++i) prefetch_row(rows[i], bytes + i);
}
"""


def test_one_header_prefetches() -> None:
    found = {
        path.relative_to(CSRC).as_posix()
        for path in CSRC.rglob("*")
        if path.suffix in {".h", ".cc", ".cu"}
        and re.search(r"__builtin_prefetch|_mm_prefetch", path.read_text(encoding="utf-8"))
    }
    assert found == {HEADER.relative_to(CSRC).as_posix()}


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("name", ["prefetch_near", "prefetch_second", "prefetch_once"])
def test_calls_in_a_function_that_only_prefetches_stay(name: str, tmp_path: Path) -> None:
    """Without the empty assembly in the header GCC 12 leaves nothing of these loops."""
    source = tmp_path / "loop.cc"
    source.write_text(LOOP.replace("PREFETCH", name), encoding="utf-8")
    command = ["g++", "-std=c++20", "-O3", "-S", "-o", "-", f"-I{CSRC}", str(source)]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"\bprefetch|\bprfm", made), made
