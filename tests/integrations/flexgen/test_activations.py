"""Memory of a decoded token's activations is used again, and never while somebody reads it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from cxl_offload.integrations.flexgen.accelerator import HostAccelerator
from cxl_offload.integrations.flexgen.devices import MOST_KEPT_BYTES, MOST_WAITING, HostDevice
from cxl_offload.integrations.flexgen.recorder import Recorder
from cxl_offload.memory import Preferred, Session
from cxl_offload.objects.kind_store import MemorySource, Part, TierStore

SHAPE = (4, 1, 64)


@pytest.fixture
def device(session: Session) -> Iterator[HostDevice]:
    parts = {"act": (Part("act", Preferred((0,))),)}
    made = HostDevice(TierStore(MemorySource(session), parts, pin=False), keeps_activations=True)
    yield made
    made.forget_activations()
    gc.collect()


def live(session: Session) -> int:
    gc.collect()
    return session.stats().asked_bytes.current


def test_memory_is_used_again_and_stays_counted(device: HostDevice, session: Session) -> None:
    first = device.allocate(SHAPE, np.float16)
    address, held = first.data.data_ptr(), live(session)
    first.delete()
    del first
    assert live(session) == held
    again = device.allocate(SHAPE, np.float16)
    assert again.data.data_ptr() == address
    assert device.store.use()["act", "act"].peak_bytes == 4 * 64 * 2
    del again
    device.forget_activations()
    assert live(session) == 0


def test_memory_that_is_read_is_not_given_to_another(device: HostDevice) -> None:
    """FlexGen deletes what it loads from; the accelerator reads it where it lies."""
    accelerator = HostAccelerator(Recorder(lambda *_: {}, local_node=0))
    first = device.allocate(SHAPE, np.float16)
    address = first.data.data_ptr()
    loaded = first.move(accelerator)
    del first
    assert loaded.data.data_ptr() == address
    other = device.allocate(SHAPE, np.float16)
    assert other.data.data_ptr() != address
    del loaded
    assert device.allocate(SHAPE, np.float16).data.data_ptr() == address


def test_other_shapes_and_large_ones_do_not_wait(device: HostDevice, session: Session) -> None:
    many = [device.allocate(SHAPE, np.float16) for _ in range(MOST_WAITING + 3)]
    each = many[0].data.nbytes
    del many
    assert live(session) == MOST_WAITING * each
    prompt = device.allocate((4, 7, 64), np.float16)
    assert live(session) == prompt.data.nbytes
    del prompt
    large = device.allocate((MOST_KEPT_BYTES + 1,), np.int8)
    del large
    assert live(session) == 7 * each
    with device.as_kind("act"):
        device.forget_activations()
    assert live(session) == 0


def test_a_gpu_may_still_copy_from_what_is_deleted(session: Session) -> None:
    parts = {"act": (Part("act", Preferred((0,))),)}
    device = HostDevice(TierStore(MemorySource(session), parts, pin=False))
    held = device.allocate(SHAPE, np.float16)
    assert isinstance(held.data, torch.Tensor)
    del held
    assert live(session) == 0
