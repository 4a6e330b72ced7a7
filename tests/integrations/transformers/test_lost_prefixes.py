"""Memory of kept prefixes that fails: ``generate()`` goes on, and gives the same tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cxl_offload.integrations.transformers import KeptPrefixes, offload
from cxl_offload.integrations.transformers.prefix_blocks import FoundBlocks
from cxl_offload.kept import KeptLayout, KeptReader, kept_path
from cxl_offload.memory import Session, lost_memory, survive_memory_errors
from tests.memory.failures import lose

from .models import generate, make
from .prefix_prompts import BLOCK, CXL, counts_of, texts


@pytest.fixture(params=[True, False], ids=["interrupted", "quiet"], autouse=True)
def surviving(request: pytest.FixtureRequest) -> Iterator[None]:
    with survive_memory_errors(interrupt=request.param):
        yield


def kept(folder: Path) -> KeptPrefixes:
    return KeptPrefixes(
        bytes="4MiB", persist="test", persist_folder=str(folder), block_tokens=BLOCK
    )


def layout_of(folder: Path) -> KeptLayout:
    reading = KeptReader(kept_path("test", folder), None)
    layout = reading.layout
    reading.close()
    return layout


def blocks_at(folder: Path) -> tuple[int, int]:
    """Address and bytes of the blocks of this process's store."""
    layout = layout_of(folder)
    lines = Path("/proc/self/maps").read_text().splitlines()
    (line,) = [line for line in lines if line.endswith(str(kept_path("test", folder)))]
    first = int(line.partition("-")[0], 16) + layout.data_at
    return first, layout.slots * layout.block_bytes


def lose_all(folder: Path) -> None:
    first, nbytes = blocks_at(folder)
    for at in range(first, first + nbytes, 4096):
        lose(at)


def test_blocks_that_fail_between_prompts_are_computed_again(
    tmp_path: Path, session: Session
) -> None:
    model = make("llama")
    right = generate(model, **texts(0))
    with offload(model, CXL, prefixes=kept(tmp_path), session=session) as done:
        assert torch.equal(generate(model, **texts(0)), right)
        lose_all(tmp_path)
        for _ in range(2):
            assert torch.equal(generate(model, **texts(0)), right)
        assert counts_of(done).found_tokens == 0
        assert counts_of(done).damaged_blocks > 0
        assert lost_memory() == ()


def test_blocks_that_fail_while_they_are_read_are_computed_again(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_into = FoundBlocks.read_into
    failed: list[bool] = []

    def fails(found: FoundBlocks, *given: Any) -> None:
        if not failed:
            failed.append(True)
            lose_all(tmp_path)
        read_into(found, *given)

    model = make("llama")
    right = generate(model, **texts(0))
    with offload(model, CXL, prefixes=kept(tmp_path), session=session):
        generate(model, **texts(0))
        monkeypatch.setattr(FoundBlocks, "read_into", fails)
        assert torch.equal(generate(model, **texts(0)), right)
        assert failed
        assert lost_memory() == ()


def test_store_whose_file_is_cut_is_left_out(tmp_path: Path, session: Session) -> None:
    model = make("llama")
    right = generate(model, **texts(0))
    with offload(model, CXL, prefixes=kept(tmp_path), session=session) as done:
        generate(model, **texts(0))
        layout = layout_of(tmp_path)
        os.truncate(kept_path("test", tmp_path), layout.data_at)
        for _ in range(3):
            assert torch.equal(generate(model, **texts(0)), right)
        assert counts_of(done).found_tokens == 0
        os.truncate(kept_path("test", tmp_path), layout.file_bytes)
