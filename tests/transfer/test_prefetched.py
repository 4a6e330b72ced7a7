"""Prefetching by the copy engine, some steps ahead of their use."""

from __future__ import annotations

import numpy as np
import pytest

from cxl_offload import _C
from cxl_offload.memory import Session
from cxl_offload.transfer import CopyLink, Transfer, prefetched

from .engine_ground import CHUNK, engine_of, host, on_gpu


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("steps", [0, 1, 2, 9])
def test_prefetch_gives_each_step_its_own_bytes(
    session: Session, driver: _C.FakeDriver, depth: int, steps: int
) -> None:
    """The consumer's work runs late: a copy that did not wait for it would be seen."""
    compute = 99
    layers = [host(session, CHUNK + step, "bind:2") for step in range(steps)]
    slots = [on_gpu(CHUNK + 16) for _ in range(depth + 1)]
    seen = [np.zeros(CHUNK + step, np.uint8) for step in range(steps)]
    with engine_of(session, staging_bytes=0) as engine:
        transfers = [
            Transfer(
                target=slots[step % (depth + 1)].ctypes.data,
                source=layer[0].address,
                nbytes=CHUNK + step,
            )
            for step, layer in enumerate(layers)
        ]
        for step, transfer in enumerate(
            prefetched(engine, iter(transfers), depth=depth, stream=compute)
        ):
            assert transfer is transfers[step]
            assert engine.links()[CopyLink("to_device", 2)].copies == min(steps, step + 1 + depth)
            driver.copy(
                target=seen[step].ctypes.data,
                source=transfer.target,
                nbytes=CHUNK + step,
                stream=compute,
            )
        driver.finish(compute)
        for layer, got in zip(layers, seen, strict=True):
            assert (got == layer[1]).all()
    del layers


def test_prefetch_of_nothing_ahead_is_refused(session: Session) -> None:
    with engine_of(session) as engine, pytest.raises(ValueError, match="0 transfers"):
        next(prefetched(engine, [], depth=0, stream=1))
