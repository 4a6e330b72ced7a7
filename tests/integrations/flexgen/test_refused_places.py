"""Places that FlexGen's kinds cannot have, refused before anything is loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.flexgen import FlexGenRun, run
from cxl_offload.memory import Session


@pytest.mark.parametrize("role", ["weights", "kv"])
def test_device_as_place_is_refused_and_nothing_is_allocated(
    request_tiny: FlexGenRun, session: Session, role: str
) -> None:
    with pytest.raises(ConfigError, match=rf"--place {role}=dax:dax0\.0: .* a device is none"):
        run(replace(request_tiny, place={role: "dax:dax0.0"}), session=session)
    assert session.stats().mapped_bytes.total == 0


@pytest.mark.parametrize("role", ["weights", "kv"])
def test_copies_are_refused_and_nothing_is_allocated(
    request_tiny: FlexGenRun, session: Session, role: str
) -> None:
    with pytest.raises(ConfigError, match=rf"replicate:0,1: {role} of FlexGen cannot have copies"):
        run(replace(request_tiny, place={role: "replicate:0,1"}), session=session)
    assert session.stats().mapped_bytes.total == 0
