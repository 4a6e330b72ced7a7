"""Holds the planner's and the simulator's equations against published cases."""

from __future__ import annotations

from pathlib import Path

from cxl_offload.validation.casefile import Case, Expectation, load_cases, parse_cases
from cxl_offload.validation.report import (
    MODELS,
    PassRate,
    Result,
    pass_rates,
    predict,
    validate,
)

__all__ = [
    "MODELS",
    "PUBLISHED_CASES",
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

PUBLISHED_CASES = Path(__file__).parent / "cases" / "published.json"
"""The open cases that come with the package, each with its source."""
