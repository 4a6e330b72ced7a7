"""A plan for what is not there is not carried out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.plans import asked_of, planned_for
from cxl_offload.plan.plan_file import parse_plan
from tests.fuzz import sound


def test_plan_that_is_advice_only_is_refused_with_its_reason() -> None:
    text = next(
        each for each in sound.plans() if yaml.safe_load(each)["executor"] == "transformers"
    )
    plan = parse_plan(text, file="p.yaml")
    assert asked_of(plan).policies
    advice = replace(plan, runs=False, advice="planned as if GPU h100 were there")
    for refused in (lambda: asked_of(advice), lambda: planned_for(1, advice)):
        with pytest.raises(ConfigError, match="advice only: planned as if GPU h100 were there"):
            refused()
