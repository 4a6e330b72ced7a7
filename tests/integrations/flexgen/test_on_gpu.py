"""The same runs with a real GPU as FlexGen's accelerator: same tokens, pinned host memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cxl_offload.integrations.flexgen import FlexGenRun, LoadedModel, run
from cxl_offload.memory import Session

from .damage import generate_damaged
from .reference import Reference
from .test_tokens_identical import CASES, DAMAGES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", CASES)
def test_tokens_equal_transformers_with_a_gpu(
    name: str, request_tiny: FlexGenRun, session: Session, reference: Reference
) -> None:
    request = replace(request_tiny, accelerator="cuda", **CASES[name][0])

    report = run(request, session=session)

    np.testing.assert_array_equal(report.tokens, reference.tokens)
    assert report.accelerator == "cuda"


@pytest.mark.parametrize(("name", "place"), DAMAGES[:4], ids=lambda value: str(value))
def test_tokens_change_when_kv_is_spoilt_with_a_gpu(
    name: str, place: str | int, request_tiny: FlexGenRun, session: Session, reference: Reference
) -> None:
    request = replace(request_tiny, accelerator="cuda", **CASES[name][0])

    report = generate_damaged(request, session, place)

    assert not np.array_equal(report.tokens, reference.tokens)


def test_host_kv_is_pinned_for_the_gpu(request_tiny: FlexGenRun, session: Session) -> None:
    request = replace(request_tiny, accelerator="cuda", place={"kv": "bind:cxl"})

    with LoadedModel(request, session=session) as loaded:
        loaded.generate()
        pinned = [tensor.data.is_pinned() for tensor in loaded.model.kv_tensors()]

    assert pinned
    assert all(pinned)
