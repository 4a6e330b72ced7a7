"""FlexGen's modules have this package's linear layers for the length of a run."""

from __future__ import annotations

from dataclasses import replace

import flexgen.pytorch_backend
import pytest
import torch
from torch.nn import functional

from cxl_offload.integrations.flexgen import FlexGenRun, run
from cxl_offload.memory import Session
from cxl_offload.ops.measured_linear import MeasuredLinear


def test_flexgen_has_its_own_functions_again_after_a_run(
    request_tiny: FlexGenRun, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, ...]] = []
    original = MeasuredLinear.__call__

    def counted(
        self: MeasuredLinear,
        inputs: torch.Tensor,
        *rest: torch.Tensor,
        **named: torch.Tensor,
    ) -> torch.Tensor:
        calls.append(tuple(inputs.shape))
        return original(self, inputs, *rest, **named)

    monkeypatch.setattr(MeasuredLinear, "__call__", counted)
    run(request_tiny, session=session)
    assert len(calls) > 6 * request_tiny.gen_len
    calls.clear()
    run(replace(request_tiny, cpu_linear="half"), session=session)
    assert not calls
    assert flexgen.pytorch_backend.F is functional
