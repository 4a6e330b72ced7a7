"""Holds the planner's and the simulator's equations against published cases."""

from __future__ import annotations

from pathlib import Path

from cxl_offload.validation.casefile import Case, Expectation, load_cases, parse_cases
from cxl_offload.validation.report import (
    MODELS,
    Absolute,
    PassRate,
    Result,
    absolute_errors,
    pass_rates,
    predict,
    validate,
)

__all__ = [
    "MODELS",
    "PLAN_CASES",
    "PUBLISHED_CASES",
    "SHIPPED",
    "Absolute",
    "Case",
    "Expectation",
    "PassRate",
    "Result",
    "absolute_errors",
    "load_cases",
    "parse_cases",
    "pass_rates",
    "predict",
    "validate",
]

PUBLISHED_CASES = Path(__file__).parent / "cases" / "published.json"
"""The open cases that come with the package, each with its source."""

PLAN_CASES = PUBLISHED_CASES.with_name("plans.json")
"""Those that ask the planner; most are published outside the five papers."""

SHIPPED = (PUBLISHED_CASES, PLAN_CASES)
"""What is answered where no file is named."""
