"""FlexGen's copies by the copy engine: same tokens, every byte on its link, nothing left behind.

The GPU is a driver whose streams are threads of nobody: its copies are real, its memory the host's.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from cxl_offload import _C
from cxl_offload.errors import ConfigError
from cxl_offload.integrations.flexgen import FlexGenReport, FlexGenRun, loaded_model, run, scope
from cxl_offload.integrations.flexgen.copies import Copier, CopyWay, EngineCopies, HostCopies
from cxl_offload.memory import Session
from cxl_offload.transfer import CopyEngine, CopyLink, LinkUse

from .conftest import machine
from .reference import Reference

SPREAD = {
    "weights": "weighted:ldram=2,rdram=1,cxl=1@4KiB",
    "kv": "interleave:ldram,cxl@4KiB",
    "act": "bind:rdram",
}


class Watched(EngineCopies):
    """Without streams of its own, the CPU that computes must wait where a GPU's stream would."""

    def __init__(self, engine: CopyEngine) -> None:
        self.side_stream = False
        self.counted: dict[CopyLink, LinkUse] = {}
        self.late = 0
        super().__init__(engine, HostCopies(), lambda: None)

    def move(self, dst: torch.Tensor, src: torch.Tensor, way: CopyWay) -> None:
        super().move(dst, src, way)
        if self.side_stream:
            self.late += 1
        else:
            self._engine.drain()

    def close(self) -> None:
        self.counted = self._engine.links()
        super().close()


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[FlexGenReport, Watched]]:
    """Runs a request with the engine on pinned memory of simulated nodes."""
    links: list[Watched] = []

    def make_copier(_: Any, session: Session, __: Any, recorder: Any) -> Copier:
        links.append(Watched(CopyEngine(session, staging_bytes=0, chunk_bytes=4096)))
        return Copier(links[-1], recorder)

    @contextlib.contextmanager
    def on_side(_: Any) -> Iterator[None]:
        links[-1].side_stream = True
        try:
            yield
        finally:
            links[-1].side_stream = False

    monkeypatch.setattr(loaded_model, "make_copier", make_copier)
    monkeypatch.setattr(scope._NoStreams, "stream", staticmethod(on_side))
    store = loaded_model.TierStore
    monkeypatch.setattr(
        loaded_model,
        "TierStore",
        lambda source, parts, pin: partial(store, pin=True)(source, parts),
    )

    def generated(request: FlexGenRun) -> tuple[FlexGenReport, Watched]:
        session = Session.simulated(machine(), driver=_C.FakeDriver())
        report = run(request, session=session)
        assert session.stats().asked_bytes.current == 0
        return report, links[-1]

    return generated


@pytest.mark.parametrize(
    "options",
    [
        {"place": SPREAD},
        {"place": {**SPREAD, "weights": "split:ldram=40,rdram=30,cxl=30"}},
        {"place": {**SPREAD, "kv": "bind:cxl"}, "gpu_batch_size": 2, "num_gpu_batches": 4},
        {"place": SPREAD, "overlap": False},
        {"place": SPREAD, "percent": (25, 75, 0, 100, 0, 100), "cpu_cache_compute": True},
        {"place": SPREAD, "sep_layer": False},
    ],
    ids=["spread", "split", "four batches", "no overlap", "CPU attention", "whole layers"],
)
def test_tokens_are_the_same_and_every_byte_is_on_its_link(
    generate: Callable[..., tuple[FlexGenReport, Watched]],
    request_tiny: FlexGenRun,
    reference: Reference,
    options: dict[str, Any],
) -> None:
    report, link = generate(replace(request_tiny, **options))
    np.testing.assert_array_equal(report.tokens, reference.tokens)
    assert (link.late > 0) == options.get("overlap", True)
    recorded: Counter[tuple[str, int]] = Counter()
    for event in report.trace:
        if event.engine == "h2d":
            recorded.update({("to_device", node): size for node, size in event.read_bytes.items()})
        if event.engine == "d2h":
            recorded.update({("to_host", node): size for node, size in event.write_bytes.items()})
    counted = {(at.direction, at.node): use.nbytes for at, use in link.counted.items()}
    # Loading the model is not in the trace, and copies of pieces go another way.
    assert {way for way, _ in counted} == {"to_device", "to_host"}
    for at, nbytes in counted.items():
        assert nbytes > 0
        assert recorded[at] >= 0.5 * nbytes
    assert sum(counted.values()) >= 0.5 * sum(recorded.values())


def test_a_spoilt_copy_changes_the_tokens(
    generate: Callable[..., tuple[FlexGenReport, Watched]],
    request_tiny: FlexGenRun,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or else the test above could pass without the engine's bytes being used."""
    submit = CopyEngine.to_device

    def spoilt(self: CopyEngine, *, target: Any, source: Any, **options: Any) -> Any:
        handle = submit(self, target=target, source=source, **options)
        assert handle is not None
        handle.wait()
        target.neg_()
        return handle

    monkeypatch.setattr(CopyEngine, "to_device", spoilt)
    report, _ = generate(replace(request_tiny, place=SPREAD))
    assert not np.array_equal(report.tokens, reference.tokens)


def test_the_engine_is_refused_without_a_gpu(request_tiny: FlexGenRun) -> None:
    with pytest.raises(ConfigError, match="--copies engine"):
        run(replace(request_tiny, copies="engine"))
    with pytest.raises(ConfigError, match="--copies dma"):
        run(replace(request_tiny, copies="dma"))  # type: ignore[arg-type]
