"""Numbers that no pool has are refused where an index of chunks is made; vLLM is not needed."""

from __future__ import annotations

import pytest

from cxl_offload.integrations.vllm.kv_admission import Admission


@pytest.mark.parametrize(("chunks", "tokens"), [(10, 0), (-1, 16), (10, -16), (-5, 0)])
def test_chunks_that_no_pool_has_are_refused_in_one_line(chunks: int, tokens: int) -> None:
    with pytest.raises(ValueError, match=f"over {chunks} chunks of {tokens} tokens") as told:
        Admission(chunks, tokens)
    assert "\n" not in str(told.value)


def test_pool_without_chunks_is_none_to_refuse() -> None:
    """A worker without KV layers has one."""
    assert Admission(0, 16).stores_new
