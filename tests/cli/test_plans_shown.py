"""Plans as they are printed: what is said in words, and what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cxl_offload.plan.plan_file import Batch, CxlUse, Home, Plan, PriceEstimate, save_plan
from cxl_offload.plan.replay_check import ReplayCheck

from .test_options import run


def planned(folder: Path, name: str, **changes: object) -> Path:
    """A plan of one kind of tensor."""
    save_plan(Plan(**{**PLANNED, **changes}), folder / name)
    return folder / name


PLANNED: dict[str, Any] = {
    "kind": "inference", "runs": True, "executor": "flexgen",
    "model": "opt-30b", "machine": "epyc9354-cxl-a",
    "batch": Batch(size=4, count=1, prompt=512, tokens=32),
    "tokens_per_s": 50.0, "cxl": CxlUse(used=False, gain=None, reason="none is there"),
    "command": ("cxl-offload", "flexgen", "--plan", "plan.yaml"),
    "homes": (), "phases": (), "node_bytes": {}, "gpu_bytes": 0, "drive_bytes": 0,
}  # fmt: skip


def test_comparison_says_in_words_what_else_than_memory_differs(tmp_path: Path) -> None:
    first = planned(tmp_path, "a.yaml")
    second = planned(tmp_path, "b.yaml", executor="vllm", model="opt-13b")
    shorter = Batch(size=4, count=1, prompt=128, tokens=32)
    third = planned(tmp_path, "c.yaml", batch=shorter)
    text = " ".join(run("plan", "compare", str(first), str(second))[1].split())
    assert "the first is for flexgen, the second for vllm" in text
    assert "plan both with the same --executor" in text
    assert "the models differ: opt-30b and opt-13b" in text
    assert "the lengths of prompts or answers differ" in run(
        "plan", "compare", str(first), str(third)
    )[1].replace("\n", " ")
    assert "Note:" not in run("plan", "compare", str(first), str(first))[1]


def test_plan_that_is_advice_prints_no_command_that_would_be_refused(tmp_path: Path) -> None:
    runs = planned(tmp_path, "a.yaml")
    advice = planned(tmp_path, "b.yaml", runs=False, advice="it computes on the CPU")
    assert "cxl-offload flexgen --plan" in run("plan", "show", str(runs))[1]
    text = run("plan", "show", str(advice))[1]
    assert "advice only: it computes on the CPU" in " ".join(text.split())
    assert "cxl-offload flexgen" not in text


def test_resources_that_bring_nothing_are_one_line(tmp_path: Path) -> None:
    gains = {"ldram capacity": 0.0, "link": 0.443, "GPU memory": 0.0}
    prices = tuple(
        PriceEstimate(what=what, unit="GiB", gain_tokens_per_s=gain) for what, gain in gains.items()
    )
    text = run("plan", "show", str(planned(tmp_path, "a.yaml", prices=prices)))[1]
    assert "+0.443" in text
    assert "+0 " not in text
    words = " ".join(text.split())
    assert "One GiB more of any of these alone brings nothing: ldram capacity, GPU memory." in words


def test_doubt_about_a_speed_is_in_the_line_of_the_speed(tmp_path: Path) -> None:
    note = ReplayCheck("step", 2.0, 3.1).sentence()
    text = run("plan", "show", str(planned(tmp_path, "a.yaml", notes=(note,))))[1]
    first_lines = " ".join(text.split("CXL memory")[0].split())
    assert "50 tokens/s predicted; equations and replay of the step differ by 55 %" in first_lines


def test_file_of_prompts_is_said_to_be_the_users(tmp_path: Path) -> None:
    command = ("cxl-offload", "generate", "--plan", "plan.yaml", "--prompts", "prompts.txt")
    text = run("plan", "show", str(planned(tmp_path, "a.yaml", command=command)))[1]
    assert "prompts.txt is a file of yours: one prompt a line, at most 4." in text
    assert "is a file of yours" not in run("plan", "show", str(planned(tmp_path, "b.yaml")))[1]


def test_plan_that_keeps_the_cache_in_a_smaller_type_names_it(tmp_path: Path) -> None:
    homes = (Home(kind="kv", where="ldram", percent=100.0, bytes=1 << 20, policy="bind:ldram"),)
    small = planned(
        tmp_path, "a.yaml", executor="transformers", kv_dtype="float8_e5m2", homes=homes
    )
    assert "kv (float8_e5m2)  " in run("plan", "show", str(small))[1]
    own = planned(tmp_path, "b.yaml", executor="transformers", homes=homes)
    assert "kv (" not in run("plan", "show", str(own))[1]


def test_policy_that_is_too_long_is_broken_behind_a_comma(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = "weighted:ldram=47,rdram=28,cxl=25@1912KiB"
    home = Home(kind="activations", where="ldram", percent=100.0, bytes=1 << 40, policy=policy)
    file = str(planned(tmp_path, "a.yaml", homes=(home,)))
    monkeypatch.setenv("COLUMNS", "75")
    words = run("plan", "show", file)[1].split()
    assert "weighted:ldram=47,rdram=28," in words
    assert "cxl=25@1912KiB" in words
    monkeypatch.setenv("COLUMNS", "140")
    assert policy in run("plan", "show", file)[1].split()
