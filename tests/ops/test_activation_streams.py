"""The fences of copies from and to a GPU, checked on a stand-in for torch's streams.

Every stream is a list of what was queued on it. Copies run at once, so that contents are right only
if nothing else is needed; the lists say whether a real GPU would have been made to wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from cxl_offload import tensor as tiers
from cxl_offload.ops import saved as module
from cxl_offload.ops.saved import Order, Saved, StreamWay

from ..memory.machines import simulated_memory

MIB = 1 << 20


@dataclass
class Event:
    stream: str
    at: int
    over: bool = False

    def query(self) -> bool:
        return self.over


@dataclass
class Stream:
    name: str
    queued: list[object] = field(default_factory=list)
    cuda_stream: int = 0

    def wait_stream(self, other: Stream) -> None:
        self.queued.append((other.name, len(other.queued)))

    def wait_event(self, event: Event) -> None:
        self.queued.append((event.stream, event.at))

    def record_event(self) -> Event:
        return Event(self.name, len(self.queued))


class Cuda:
    """torch.cuda, for one device whose memory is the CPU's."""

    def __init__(self) -> None:
        self.compute = self.current = Stream("compute")
        self.names = iter(["out", "in"])

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802
        return Stream(next(self.names))

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        stream.queued.append("copy")
        self.current = before


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Marks of tensors used by a stream, which CPU tensors refuse."""
    marks: list[str] = []

    def mark(owner: torch.Tensor, stream: Stream) -> None:
        marks.append(stream.name)

    monkeypatch.setattr(torch.Tensor, "record_stream", mark)
    monkeypatch.setattr(tiers, "record_stream", lambda home, stream, session: None)
    return marks


def saved_by(way: StreamWay, source: torch.Tensor) -> Saved:
    home = tiers.empty(source.numel(), dtype=torch.uint8, session=simulated_memory())
    saved = Saved(source.untyped_storage(), home, way, Order())
    way.leave(saved, source)
    return saved


def source_of(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def test_copy_waits_for_what_made_the_tensor_and_the_backward_for_the_copy(
    recorded: list[str],
) -> None:
    cuda = Cuda()
    way = StreamWay(torch.device("cpu"), simulated_memory(), cuda)
    cuda.compute.queued.append("forward")
    source = source_of(1000)
    saved = saved_by(way, source)
    assert way._out.queued == [("compute", 1), "copy"]
    cuda.compute.queued.append("backward of the layers behind")
    way.start(saved)
    way.start(saved)
    # Behind the last use of the memory that it writes, and behind the copy to the tier.
    assert way._in.queued == [("compute", 2), ("out", 2), "copy"]
    assert recorded == ["in"]
    assert torch.equal(way.bring(saved), source)
    assert cuda.compute.queued[-1] == ("in", 3)


def test_sources_are_kept_until_copied_and_no_more_than_the_limit(
    recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LEAVING_BYTES", 2500)
    cuda = Cuda()
    way = StreamWay(torch.device("cpu"), simulated_memory(), cuda)
    first = saved_by(way, source_of(1000, 1))
    saved_by(way, source_of(1000, 2))
    assert cuda.compute.queued == []
    assert not first.source.expired()
    saved_by(way, source_of(1000, 3))
    # The compute stream waits for the first copy, so that it may use that memory again.
    assert cuda.compute.queued == [("out", first.left.at)]
    assert first.source.expired()
    assert len(way._leaving) == 2
    way._leaving[0][0].over = True
    saved_by(way, source_of(100, 4))
    assert [source.numel() for _, source in way._leaving] == [1000, 100]


def test_leaving_the_context_marks_what_is_under_way_and_keeps_nothing(
    recorded: list[str],
) -> None:
    way = StreamWay(torch.device("cpu"), simulated_memory(), Cuda())
    saved = saved_by(way, source_of(1000))
    way.forget()
    assert recorded == ["out"]
    assert saved.source.expired()
    assert way._leaving_bytes == 0
