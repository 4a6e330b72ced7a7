"""The trace: every byte FlexGen moves, once, on the right node, in the right phase and step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from cxl_offload.integrations.flexgen import FlexGenReport, FlexGenRun, run
from cxl_offload.integrations.flexgen.recorder import view_bytes
from cxl_offload.memory import Session
from cxl_offload.sim.trace import Event

WEIGHTS = 378_240
ROWS, PROMPT, NEW, LAYERS, WIDTH = 8, 12, 8, 3, 64
PLACE = {
    "weights": "bind:ldram",
    "kv": "bind:cxl",
    "act": "bind:rdram",
    "workspace": "bind:ldram",
}


def _read(events: Iterable[Event]) -> Counter[int]:
    return _sum(event.read_bytes for event in events)


def _written(events: Iterable[Event]) -> Counter[int]:
    return _sum(event.write_bytes for event in events)


def _sum(maps: Iterable[Mapping[int, int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for each in maps:
        total.update(each)
    return total


def _pick(report: FlexGenReport, **values: str) -> list[Event]:
    return [e for e in report.trace if all(getattr(e, k) == v for k, v in values.items())]


def test_weights_are_read_once_a_token_from_their_node(
    request_tiny: FlexGenRun, session: Session
) -> None:
    report = run(replace(request_tiny, place=PLACE | {"kv": "bind:cxl"}), session=session)

    loads = _pick(report, queue="load_weight")

    assert {event.engine for event in loads} == {"h2d"}
    assert {event.tensor_kind for event in loads} == {"weights"}
    assert _read(loads) == {0: NEW * WEIGHTS}
    assert sum(event.accelerator_bytes for event in loads) == NEW * WEIGHTS


def test_cache_is_read_as_long_as_it_is_and_written_once(
    request_tiny: FlexGenRun, session: Session
) -> None:
    place = {key: value for key, value in PLACE.items() if key != "workspace"}

    report = run(replace(request_tiny, place=place), session=session)

    row = 2 * LAYERS * ROWS * WIDTH * 2  # K and V of one position in half precision
    attended = sum(PROMPT + token for token in range(1, NEW))
    # FlexGen copies one position more than it has: the one the new token will fill.
    assert _read(_pick(report, queue="load_cache")) == {2: row * attended}
    assert {event.engine for event in _pick(report, queue="load_cache")} == {"h2d"}
    stored = _pick(report, queue="store_cache")
    assert {event.engine for event in stored} == {"d2h"}
    assert _written(stored) == {2: row * (PROMPT + NEW - 2)}
    assert _written(_pick(report, queue="store_cache", phase="prefill")) == {2: row * PROMPT}


def test_cpu_attention_reads_the_tier_and_then_the_workspace(
    request_tiny: FlexGenRun, session: Session
) -> None:
    request = replace(request_tiny, cpu_cache_compute=True, cpu_attention="workspace", place=PLACE)
    report = run(request, session=session)

    element_rows = 2 * LAYERS * ROWS * WIDTH
    cached = sum(PROMPT + token - 1 for token in range(1, NEW))
    loads = _pick(report, queue="load_cache", engine="cpu")
    assert _read(loads) == {2: 2 * element_rows * cached}
    assert _written(loads) == {0: 4 * element_rows * cached}
    attention = _pick(report, queue="compute", engine="cpu")
    assert len(attention) == LAYERS * (NEW - 1)
    attended = sum(PROMPT + token for token in range(1, NEW))
    assert _read(attention) == {0: 4 * element_rows * attended}
    assert sum(e.flops for e in attention) == 4 * LAYERS * ROWS * WIDTH * attended


def test_attention_in_place_reads_every_attended_row_once(
    request_tiny: FlexGenRun, session: Session
) -> None:
    report = run(replace(request_tiny, cpu_cache_compute=True, place=PLACE), session=session)

    attended = sum(PROMPT + token for token in range(1, NEW))
    element_rows = 2 * LAYERS * ROWS * WIDTH
    assert not _pick(report, queue="load_cache")
    attention = _pick(report, queue="compute", engine="cpu")
    assert {event.tensor_kind for event in attention} == {"kv"}
    assert _read(attention) == {2: 2 * element_rows * attended}
    assert _written(attention) == {}
    assert sum(e.flops for e in attention) == 4 * LAYERS * ROWS * WIDTH * attended


def test_flops_of_the_accelerator_are_those_of_the_model(
    request_tiny: FlexGenRun, session: Session
) -> None:
    report = run(request_tiny, session=session)

    def layer(tokens: int, attended: int) -> float:
        return ROWS * tokens * (24.0 * WIDTH**2 + 4.0 * attended * WIDTH)

    prefill = LAYERS * layer(PROMPT, PROMPT) + 2.0 * ROWS * PROMPT * WIDTH * 272
    decode = sum(
        LAYERS * layer(1, PROMPT + token) + 2.0 * ROWS * WIDTH * 272 for token in range(1, NEW)
    )
    assert sum(e.flops for e in _pick(report, phase="prefill")) == pytest.approx(prefill)
    assert sum(e.flops for e in _pick(report, phase="decode")) == pytest.approx(decode)


def test_split_cache_is_read_from_every_tier_by_its_rows(
    request_tiny: FlexGenRun, session: Session
) -> None:
    place = {"kv": "split:ldram=50,rdram=25,cxl=25"}

    report = run(replace(request_tiny, place=place), session=session)

    read = _read(_pick(report, queue="load_cache"))
    assert read[0] == 2 * read[1] == 2 * read[2] > 0


def test_disk_copies_are_recorded_with_their_end_in_host_memory(
    request_tiny: FlexGenRun, session: Session
) -> None:
    request = replace(
        request_tiny,
        percent=(0, 100, 0, 0, 0, 100),
        cpu_cache_compute=True,
        place={
            "weights": "bind:ldram",
            "workspace": "bind:cxl",
            "act": "bind:ldram",
        },
    )

    report = run(request, session=session)

    loads = _pick(report, queue="load_cache", engine="nvme")
    element_rows = 2 * LAYERS * ROWS * WIDTH
    cached = sum(PROMPT + token - 1 for token in range(1, NEW))
    assert _written(loads) == {2: 4 * element_rows * cached}
    stores = _pick(report, queue="store_cache", engine="nvme")
    assert sum(_read(stores).values()) == 2 * element_rows * (PROMPT + NEW - 2)


def test_steps_are_flexgens_barriers_and_phases_follow_tokens(
    request_tiny: FlexGenRun, session: Session
) -> None:
    request = replace(request_tiny, gpu_batch_size=4, num_gpu_batches=2)

    report = run(request, session=session)

    steps = [event.step for event in report.trace]
    assert steps == sorted(steps)
    layers = 2 * LAYERS + 2  # attention and MLP apart, two embeddings
    assert steps[-1] == NEW * layers * 2  # one barrier a batch and layer, one before the loop
    decode = {event.step for event in _pick(report, phase="decode")}
    prefill = {event.step for event in _pick(report, phase="prefill")}
    assert max(prefill) < min(decode)
    assert report.trace.tokens == {"prefill": ROWS * PROMPT, "decode": ROWS * (NEW - 1)}


def test_nothing_is_recorded_unless_asked(request_tiny: FlexGenRun, session: Session) -> None:
    report = run(replace(request_tiny, record=False), session=session)

    assert len(report.trace) == 0
    assert report.trace.tokens == {}


@pytest.mark.parametrize(
    "select",
    [
        lambda x: x,
        lambda x: x[3:17],
        lambda x: x[:, 5:9],
        lambda x: x[2:30:3],
        lambda x: x[1:, :, 7],
        lambda x: x[4:4],
    ],
)
def test_bytes_of_a_view_are_those_of_its_elements(select: Any) -> None:
    """Against asking for every element."""
    base = torch.zeros(40, 12, 9, dtype=torch.float32)
    start = base.data_ptr()

    def node_of(address: int) -> int:
        return (address - start) // 1024 % 3

    def ask(address: int, nbytes: int) -> Counter[int]:
        return Counter(node_of(at) for at in range(address, address + nbytes))

    view = select(base)

    found = view_bytes(view, ask)

    offsets = torch.arange(base.numel()).view(base.shape)
    expected: Counter[int] = Counter()
    for offset in select(offsets).flatten().tolist():
        expected.update(ask(start + 4 * offset, 4))
    assert found == expected
