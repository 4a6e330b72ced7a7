"""The example that kills an engine of the real vLLM, as a user starts it."""

from __future__ import annotations

import re

import pytest

from cxl_offload.kept import find_kept

from .examples import printed_by


@pytest.mark.timeout(600)
def test_engine_after_a_killed_one_finds_its_blocks_and_answers_the_same(vllm: None) -> None:
    printed = printed_by("kv_survives.py")
    assert "vLLM: 4 of 4 answers are the same tokens" in printed
    assert "not the Zen" not in printed
    found = re.findall(r"(\d+), then (\d+) of (\d+) tokens found", printed)
    assert len(found) == 4
    for before, after, asked in found:
        assert int(before) == 0
        assert 0 < int(after) < int(asked)
    assert not [file for file in find_kept() if file.name.startswith("example-")]
