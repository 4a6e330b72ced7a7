"""A plan's kinds are those of the integration, with as many bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cxl_offload.integrations.transformers.weights import weight_bytes
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.transformers.job import decoder_job
from tests.integrations.transformers.models import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_planned_kinds_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = FAMILIES[family]().to(torch.float16)
    model.config.save_pretrained(tmp_path)
    job = decoder_job(load_model(str(tmp_path)), prompt=8, generated=8)
    assert {kind: size.bytes for kind, size in job.kinds.items()} == weight_bytes(model)
