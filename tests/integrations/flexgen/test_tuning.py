"""Weights that follow the time of the tokens: pages that moved, tokens that did not change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.flexgen import FlexGenRun, LoadedModel, run, tuning
from cxl_offload.integrations.flexgen.options import parse_flags, request_from
from cxl_offload.memory import Session
from cxl_offload.topology import load_machine
from cxl_offload.tune import decisions

from ..clock import FarIsSlow

FAR = {"weights": "bind:cxl"}  # a tenth of the bandwidth: every tuner leaves it


@pytest.fixture
def published() -> Iterator[Session]:
    """A machine whose bandwidths are known."""
    session = Session.simulated(load_machine("epyc9354-cxl-a"))
    yield session
    assert session.stats().asked_bytes.current == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_stay_while_weights_move(
    request_tiny: FlexGenRun,
    published: Session,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overlap: bool,
) -> None:
    clock = FarIsSlow()
    monkeypatch.setattr(tuning, "time", clock)
    asked = replace(
        request_tiny, gen_len=48, percent=(0, 100, 0, 100, 0, 100), place=FAR, overlap=overlap
    )
    expected = run(asked, session=published).tokens
    state = tmp_path / "tuner.json"
    tuned = replace(asked, tune="step_time", tune_budget_bytes=1 << 30, tune_state=str(state))
    before = sum(one.count for one in decisions() if one.framework == "flexgen")
    with LoadedModel(tuned, session=published) as loaded:
        homes = loaded.tuned.tuner.homes  # type: ignore[union-attr]
        clock.far_share = homes.granted
        assert homes.granted() == 1.0
        np.testing.assert_array_equal(loaded.generate().tokens, expected)
        assert homes.granted() < 0.5
        trace = loaded.generate().trace
        far = sum(event.read_bytes.get(2, 0) for event in trace if event.tensor_kind == "weights")
        read = sum(
            sum(event.read_bytes.values()) for event in trace if event.tensor_kind == "weights"
        )
        assert far < 0.5 * read, "the trace still says where the weights were before"
    assert sum(one.count for one in decisions() if one.framework == "flexgen") > before
    assert json.loads(state.read_text())["tuner"] == "model"


def test_weights_stay_without_a_budget(request_tiny: FlexGenRun, published: Session) -> None:
    asked = replace(
        request_tiny, gen_len=40, percent=(0, 100, 0, 100, 0, 100), place=FAR, tune="step_time"
    )
    with LoadedModel(asked, session=published) as loaded:
        loaded.generate()
        assert loaded.tuned.tuner.homes.granted() == 1.0  # type: ignore[union-attr]


def test_options_of_the_command_line_are_those_of_the_request(tiny: Path) -> None:
    words = ["--model", str(tiny), "--tune", "step_time", "--tune-budget", "64MiB"]
    request = request_from(parse_flags("flexgen", [*words, "--tune-state", "run.json"]))
    assert (request.tune, request.tune_budget_bytes) == ("step_time", 64 << 20)
    assert request.tune_state == "run.json"
    with pytest.raises(ConfigError, match=r"--tune-budget.*much"):
        request_from(parse_flags("flexgen", ["--model", str(tiny), "--tune-budget", "much"]))


def test_budget_without_tune_is_refused(request_tiny: FlexGenRun, published: Session) -> None:
    with pytest.raises(ConfigError, match="without tune"):
        run(replace(request_tiny, tune_budget_bytes=5), session=published)
