"""Sizes that ``offload_activations`` takes and refuses."""

from __future__ import annotations

import pytest

from cxl_offload.ops.activations import offload_activations


def test_least_size_is_a_number_or_a_text() -> None:
    assert "from 1048576 bytes" in repr(offload_activations("bind:0", min_bytes="1 MiB"))
    for wrong in ("1 parsec", -1, 1.5, None):
        with pytest.raises(ValueError, match="offload_activations: min_bytes"):
            offload_activations("bind:0", min_bytes=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="offload_activations: prefetch -1"):
        offload_activations("bind:0", prefetch=-1)
