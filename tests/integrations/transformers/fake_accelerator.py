"""An accelerator that is not there: its memory is the CPU's, its copies the fake driver's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from cxl_offload import _C
from cxl_offload.integrations.transformers import generation, model_device, scope
from cxl_offload.integrations.transformers.streamed_states import StateCopies
from cxl_offload.memory import Session
from cxl_offload.topology import Machine
from cxl_offload.transfer import CopyEngine, CopyHandle

COMPUTE, ORDER = 99, 98
"""The streams that layers would be queued on, and that orders copies."""


class FakeCopies:
    """The package's copy engine over the fake driver; a buffer has its bytes when it is waited for.

    The CPU computes at once, so what a layer reads has to be there when it begins.
    """

    device = torch.device("cpu")

    def __init__(self, session: Session, driver: _C.FakeDriver) -> None:
        self.driver = driver
        self.engine = CopyEngine(session, staging_bytes=0)

    def stream(self) -> int:
        return COMPUTE

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[int]) -> CopyHandle:
        handle = self.engine.to_device(target=target, source=source, after=after)
        assert handle is not None
        return handle

    def copy_back(
        self, target: torch.Tensor, source: torch.Tensor, after: Sequence[int]
    ) -> CopyHandle:
        handle = self.engine.to_host(target=target, source=source, after=after)
        assert handle is not None
        return handle

    def behind(self, handle: CopyHandle) -> int:
        handle.stream_wait(ORDER)
        return ORDER

    def finish(self, handles: Sequence[CopyHandle]) -> None:
        self.engine.finish(handles)

    def wait_for(self, handle: CopyHandle) -> None:
        handle.stream_wait(self.stream())
        self.driver.finish(self.stream())

    def close(self) -> None:
        self.engine.close()


class LateCopies(FakeCopies):
    """Waits as a GPU does: what is queued later runs behind the copy, and nothing runs yet."""

    fenced = True

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[int]) -> CopyHandle:
        return super().copy(target, source, after if self.fenced else ())

    def wait_for(self, handle: CopyHandle) -> None:
        handle.stream_wait(self.stream())


class UnfencedCopies(LateCopies):
    """A control: copies do not wait for who reads their target."""

    fenced = False


@contextmanager
def pinning_session(machine: Machine, driver: _C.FakeDriver) -> Iterator[Session]:
    """Simulated nodes with a driver that pins; what is left of either at the end is a leak."""
    session = Session.simulated(machine, driver=driver)
    yield session
    assert session.stats().asked_bytes.current == 0
    session.trim()
    assert driver.registered_bytes == 0
    assert driver.events == 0


def fake_accelerator(
    monkeypatch: pytest.MonkeyPatch,
    make_copies: Callable[[Session], StateCopies],
    free: int = 1 << 40,
) -> None:
    """``accelerator="cuda"`` computes on the CPU, with these copies, until the test ends."""

    class FakeDevice(model_device.ModelDevice):
        def free_bytes(self) -> int:
            return free

        def open(self, most_unfinished: int) -> StateCopies:
            return make_copies(self._session)

    for module in (scope, generation):
        monkeypatch.setattr(module, "ModelDevice", FakeDevice)
        monkeypatch.setattr(module, "chosen_device", lambda *_: torch.device("cpu"))
