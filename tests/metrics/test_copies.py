"""What engines have copied is counted for the process, also when they are gone."""

from __future__ import annotations

import gc

from cxl_offload import _C, Session
from cxl_offload.metrics import MetricsReader
from cxl_offload.transfer import CopyEngine, CopyLink, link_counts

from ..memory.machines import simulated_machine
from ..transfer.engine_ground import CHUNK, engine_of, host, on_gpu

TO_GPU = CopyLink("to_device", 0)


def copied(engine: CopyEngine, session: Session, nbytes: int) -> None:
    source, _ = host(session, nbytes, "bind:0")
    target = on_gpu(nbytes)
    handle = engine.to_device(target=target.ctypes.data, source=source.address, nbytes=nbytes)
    assert handle is not None
    handle.wait()


def test_counts_of_the_process_never_fall_when_engines_go() -> None:
    session = Session.simulated(simulated_machine(), driver=_C.FakeDriver())
    before = link_counts().get(TO_GPU)
    start = 0 if before is None else before.nbytes
    seen = []
    closed, dropped = engine_of(session), engine_of(session)
    for engine in (closed, dropped):
        copied(engine, session, CHUNK)
        seen.append(link_counts()[TO_GPU].nbytes - start)
    closed.close()
    seen.append(link_counts()[TO_GPU].nbytes - start)
    del dropped, engine
    gc.collect()
    seen.append(link_counts()[TO_GPU].nbytes - start)
    seen.append(link_counts()[TO_GPU].nbytes - start)
    assert seen == [CHUNK, 2 * CHUNK, 2 * CHUNK, 2 * CHUNK, 2 * CHUNK]
    samples = MetricsReader(session).read()["copy"]
    assert {sample.labels: sample.value for sample in samples}[
        "to_device", "0"
    ] == start + 2 * CHUNK
