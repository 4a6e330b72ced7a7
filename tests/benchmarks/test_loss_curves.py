"""Loss curves compare what they say, with the reference that they name."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.loss_curves import REFERENCES, flags_of, judged


def asked(optimizer: str, parameters: str) -> argparse.Namespace:
    return argparse.Namespace(optimizer=optimizer, parameters=parameters)


@pytest.mark.parametrize("optimizer", REFERENCES)
def test_the_reference_has_its_own_states_and_parameters_of_float32(optimizer: str) -> None:
    args = asked(optimizer, "bf16")
    reference = flags_of(REFERENCES[optimizer], args)
    assert f"--optimizer={optimizer}" in reference
    assert not [flag for flag in reference if flag.startswith(("--states", "--parameters"))]
    compared = flags_of("8bit", args)
    assert compared == [*reference, "--states=8bit", "--parameters=bf16"]


def run_of(last: float) -> dict[str, object]:
    return {"losses": [9.0] * 18 + [last, last], "validation": {"20": last}}


def test_a_mean_further_above_than_the_seeds_are_apart_is_outside() -> None:
    reference = REFERENCES["lion"]
    curves = {
        reference: {0: run_of(1.0), 1: run_of(1.5)},
        "bf16": {0: run_of(1.5), 1: run_of(1.5)},
        "8bit": {0: run_of(2.0), 1: run_of(2.0)},
    }
    rows = judged(curves, reference)
    assert {(row["states"], row["within"]) for row in rows} == {
        (reference, True),
        ("bf16", True),
        ("8bit", False),
    }
    assert [row["above_torch"] for row in rows if row["states"] == "8bit"] == [0.75, 0.75]
