from __future__ import annotations

import pytest

from cxl_offload.validation.bandwidth import tiers_of_machine


def test_mixed_tiers_read_both_prefetch_settings_of_the_wanted_cluster() -> None:
    whole, cores = tiers_of_machine("xeon8468", snc=1)
    quarter, _ = tiers_of_machine("xeon8468", snc=4)
    assert cores == 48
    assert whole.prefetch_on.bytes_per_s[0] > whole.prefetch_off.bytes_per_s[0]
    assert quarter.prefetch_on.bytes_per_s[0] < whole.prefetch_on.bytes_per_s[0] / 3
    assert quarter.cache_bytes == whole.cache_bytes > 0


def test_mixed_tiers_of_a_machine_without_such_tables_raise() -> None:
    with pytest.raises(ValueError, match="snc"):
        tiers_of_machine("epyc9354-cxl-a", snc=1)
