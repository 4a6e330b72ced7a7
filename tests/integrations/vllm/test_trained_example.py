"""The example that trains a model and serves it, with the real vLLM, as a user starts it."""

from __future__ import annotations

import re

import pytest

from .examples import printed_by


@pytest.mark.timeout(600)
def test_what_was_trained_in_tiers_is_served_by_vllm_from_tiers(vllm: None) -> None:
    printed = printed_by("train_and_serve.py")
    for engine in ("transformers", "vLLM"):
        assert f"{engine}: Errors should -> never pass silently." in printed
    assert "WRONG" not in printed
    (found,) = re.findall(r"vLLM: asked again, (\d+) tokens came out of the tiers", printed)
    assert int(found) >= 32  # a block
