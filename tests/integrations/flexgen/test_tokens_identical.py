"""The same tokens as transformers wherever everything lives, and others when a tier is spoilt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cxl_offload.integrations.flexgen import FlexGenRun, run
from cxl_offload.memory import Session

from .damage import generate_damaged
from .reference import Reference

TIERED = {
    "weights": "weighted:ldram=2,rdram=1,cxl=1@4KiB",
    "kv": "interleave:ldram,cxl@4KiB",
    "act": "bind:rdram",
    "workspace": "bind:ldram",
}
SPLIT = {
    "weights": "split:ldram=40,rdram=30,cxl=30",
    "kv": "split:ldram=34,rdram=33,cxl=33",
}

# Name: (options, places that hold KV and the rows of eight in each; None when all rows share it).
CASES: dict[str, tuple[dict[str, Any], dict[str | int, set[int] | None]]] = {
    "all on host": ({}, {0: None}),
    "all on accelerator": ({"percent": (100, 0, 100, 0, 100, 0)}, {"accelerator": None}),
    "all on host, tiered": ({"place": {**TIERED, "act": "bind:cxl"}}, {0: None, 2: None}),
    "mixed 50/50": (
        {"percent": (50, 50, 50, 50, 0, 100)},
        {"accelerator": {0, 1, 2, 3}, 0: {4, 5, 6, 7}},
    ),
    "mixed 50/50, CPU attention": (
        {"percent": (50, 50, 50, 50, 0, 100), "cpu_cache_compute": True, "place": TIERED},
        {"accelerator": {0, 1, 2, 3}, 0: {4, 5, 6, 7}, 2: {4, 5, 6, 7}},
    ),
    "four tiers": (
        {"percent": (25, 75, 25, 75, 0, 100), "cpu_cache_compute": True, "place": SPLIT},
        {"accelerator": {0, 1}, 0: {2, 3}, 1: {4, 5}, 2: {6, 7}},
    ),
    "four tiers, accelerator attention": (
        {"percent": (25, 75, 25, 75, 100, 0), "place": SPLIT},
        {"accelerator": {0, 1}, 0: {2, 3}, 1: {4, 5}, 2: {6, 7}},
    ),
    "accelerator, two tiers and disk": (
        {
            "percent": (25, 50, 25, 50, 0, 100),
            "cpu_cache_compute": True,
            "place": {"weights": "split:ldram=50,cxl=50", "kv": "split:rdram=50,cxl=50"},
        },
        {"accelerator": {0, 1}, 1: {2, 3}, 2: {4, 5}, "disk": {6, 7}},
    ),
    "split of the host alone": ({"place": SPLIT}, {0: {0, 1, 2}, 1: {3, 4, 5}, 2: {6, 7}}),
    "all on disk": ({"percent": (0, 0, 0, 0, 0, 100)}, {"disk": None}),
    "all on disk, no overlap": (
        {"percent": (0, 0, 0, 0, 0, 100), "overlap": False, "cpu_cache_compute": True},
        {"disk": None},
    ),
    "CPU attention, four batches, overlap": (
        {
            "cpu_cache_compute": True,
            "gpu_batch_size": 2,
            "num_gpu_batches": 4,
            "place": {**TIERED, "kv": "bind:cxl"},
        },
        {2: None},
    ),
    "CPU attention, four batches, mixed, overlap": (
        {
            "percent": (50, 50, 50, 50, 0, 100),
            "cpu_cache_compute": True,
            "gpu_batch_size": 2,
            "num_gpu_batches": 4,
        },
        {"accelerator": {0, 2, 4, 6}, 0: {1, 3, 5, 7}},
    ),
    "CPU attention, four batches, one layer of two": (
        {
            "cpu_cache_compute": True,
            "gpu_batch_size": 2,
            "num_gpu_batches": 4,
            "sep_layer": False,
        },
        {0: None},
    ),
    "CPU attention, four batches, no overlap": (
        {
            "cpu_cache_compute": True,
            "gpu_batch_size": 2,
            "num_gpu_batches": 4,
            "overlap": False,
        },
        {0: None},
    ),
}
CASES |= {
    f"{name}, workspace": ({**options, "cpu_attention": "workspace"}, places)
    for name, (options, places) in CASES.items()
    if options.get("cpu_cache_compute")
}
DAMAGES = [(name, place) for name, (_, places) in CASES.items() for place in places]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", CASES)
def test_tokens_equal_transformers_wherever_tensors_live(
    name: str, request_tiny: FlexGenRun, session: Session, reference: Reference
) -> None:
    report = run(replace(request_tiny, **CASES[name][0]), session=session)

    np.testing.assert_array_equal(report.tokens, reference.tokens)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "place"), DAMAGES, ids=lambda value: str(value))
def test_tokens_change_when_kv_of_one_place_is_spoilt(
    name: str, place: str | int, request_tiny: FlexGenRun, session: Session, reference: Reference
) -> None:
    options, places = CASES[name]

    report = generate_damaged(replace(request_tiny, **options), session, place)

    same = (report.tokens == reference.tokens).all(axis=1)
    affected = places[place] or set(range(8))
    assert not same[sorted(affected)].all()
    untouched = sorted(set(range(8)) - affected)
    assert same[untouched].all()
    before = reference.tokens.shape[1] - 6  # spoilt before the third of eight tokens
    np.testing.assert_array_equal(report.tokens[:, :before], reference.tokens[:, :before])


def test_one_workspace_as_flexgen_makes_it_gives_wrong_tokens(
    request_tiny: FlexGenRun,
    session: Session,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control of the second workspace: without it this combination is wrong."""
    from flexgen.pytorch_backend import TorchDevice

    from cxl_offload.integrations.flexgen.devices import HostDevice

    def one(self: HostDevice, *args: Any) -> None:
        with self.as_kind("workspace"):
            TorchDevice.init_attention_compute_workspace(self, *args)

    monkeypatch.setattr(HostDevice, "init_attention_compute_workspace", one)
    options = CASES["CPU attention, four batches, overlap, workspace"][0]

    report = run(replace(request_tiny, **options), session=session)

    assert not (report.tokens == reference.tokens).all()


def test_generating_again_in_one_session_gives_the_same_tokens(
    request_tiny: FlexGenRun, session: Session, reference: Reference
) -> None:
    from cxl_offload.integrations.flexgen import LoadedModel

    with LoadedModel(replace(request_tiny, warmup=True), session=session) as loaded:
        first = loaded.generate()
        second = loaded.generate()

    np.testing.assert_array_equal(first.tokens, reference.tokens)
    np.testing.assert_array_equal(second.tokens, reference.tokens)
    assert len(first.trace) == len(second.trace)
    assert first.trace == second.trace


def test_rows_end_after_the_stop_token(
    request_tiny: FlexGenRun, session: Session, reference: Reference
) -> None:
    stop = int(reference.tokens[0, 14])

    report = run(replace(request_tiny, stop=stop), session=session)

    for row, expected in zip(report.tokens[:, 12:], reference.tokens[:, 12:], strict=True):
        hits = np.flatnonzero(expected == stop)
        end = hits[0] + 1 if hits.size else len(expected)
        np.testing.assert_array_equal(row[:end], expected[:end])
        assert (row[end:] == 1).all()
