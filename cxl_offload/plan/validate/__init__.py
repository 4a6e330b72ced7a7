"""Holds the public models against published cases."""

from __future__ import annotations

from cxl_offload.plan.validate.casefile import Case, Expectation, load_cases, parse_cases
from cxl_offload.plan.validate.report import (
    MODELS,
    PassRate,
    Result,
    pass_rates,
    predict,
    validate,
)

__all__ = [
    "MODELS",
    "Case",
    "Expectation",
    "PassRate",
    "Result",
    "load_cases",
    "parse_cases",
    "pass_rates",
    "predict",
    "validate",
]
