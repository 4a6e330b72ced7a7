"""Plans as they are printed: what is said in words, and what is left out."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cxl_offload.plan.plan_file import (
    Batch,
    CopiesUse,
    CxlUse,
    Home,
    PhaseEstimate,
    Plan,
    PriceEstimate,
    save_plan,
)
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
    assert "How much faster the second is cannot be said." in text
    assert "%" not in text
    assert json.loads(run("plan", "compare", str(first), str(second), "--json")[1])["gain"] is None
    assert "the lengths of prompts or answers differ" in run(
        "plan", "compare", str(first), str(third)
    )[1].replace("\n", " ")
    assert "Note:" not in run("plan", "compare", str(first), str(first))[1]


def test_copies_of_weights_are_said_where_a_plan_could_have_them(tmp_path: Path) -> None:
    one = planned(tmp_path, "a.yaml")
    reason = "each socket reads what is near it, for 1 GiB more memory"
    used = CopiesUse(used=True, gain=0.083, bytes=1 << 30, reason=reason)
    two = planned(tmp_path, "b.yaml", copies=used)
    said = f"one near each socket (+8.3% predicted); {reason}"
    assert f"Copies of weights: {said}." in " ".join(run("plan", "show", str(two))[1].split())
    assert "Copies of weights" not in run("plan", "show", str(one))[1]
    rows = json.loads(run("plan", "compare", str(one), str(two), "--json")[1])["rows"]
    assert rows["copies"] == ["-", said]
    assert json.loads(run("plan", "show", str(two), "--json")[1])["copies"]["gain"] == 0.083


def test_sockets_are_planned_by_the_command(tmp_path: Path) -> None:
    asked = ["--model", "opt-13b", "--machine", "spr-2", "--max-batches", "1", "--json"]
    lengths = ["--prompt-len", "32", "--gen-len", "200"]
    code, text, _ = run("plan", "inference", *asked, *lengths, "--sockets", "2")
    assert code == 0
    plan = json.loads(text)
    assert plan["executor"] == "transformers"  # who alone has the option
    assert plan["copies"]["used"]
    assert plan["policies"]["mlp"] == "replicate:ldram,rdram"
    assert sum(plan["threads"].values()) == 48
    code, _, error = run("plan", "inference", *asked, "--sockets", "3")
    assert code == 2
    assert "3 sockets: spr-2 has 2 with CPUs" in error


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


@pytest.mark.parametrize(
    ("executor", "more", "count", "said"),
    [
        ("flexgen", (), 1, False),  # as many as one batch on the GPU
        ("flexgen", (), 2, True),
        ("transformers", (), 1, True),
        ("transformers", ("--accelerator", "cuda"), 1, False),
    ],
)
def test_plan_says_how_to_plan_for_fewer_prompts(
    tmp_path: Path, executor: str, more: tuple[str, ...], count: int, said: bool
) -> None:
    command = ("cxl-offload", "generate", "--prompts", "prompts.txt", *more)
    batch = Batch(size=4, count=count, prompt=512, tokens=32)
    file = planned(tmp_path, "a.yaml", executor=executor, command=command, batch=batch)
    text = " ".join(run("plan", "show", str(file))[1].split())
    assert (f"at most {4 * count}. To plan for fewer, give --max-batches." in text) == said


def test_plan_that_keeps_the_cache_in_a_smaller_type_names_it(tmp_path: Path) -> None:
    homes = (Home(kind="kv", where="ldram", percent=100.0, bytes=1 << 20, policy="bind:ldram"),)
    small = planned(
        tmp_path, "a.yaml", executor="transformers", kv_dtype="float8_e5m2", homes=homes
    )
    assert "kv (float8_e5m2)  " in run("plan", "show", str(small))[1]
    own = planned(tmp_path, "b.yaml", executor="transformers", homes=homes)
    assert "kv (" not in run("plan", "show", str(own))[1]


def test_plan_that_keeps_states_in_a_smaller_type_names_it(tmp_path: Path) -> None:
    homes = tuple(
        Home(kind=kind, where="ldram", percent=100.0, bytes=1 << 20, policy="bind:ldram")
        for kind in ("fp32_master", "exp_avg", "exp_avg_sq")
    )
    given = {"kind": "training", "executor": "deepspeed", "homes": homes}
    text = run("plan", "show", str(planned(tmp_path, "a.yaml", state_dtype="uint8", **given)))[1]
    assert "exp_avg (uint8) " in text
    assert "exp_avg_sq (uint8) " in text
    assert "fp32_master (" not in text
    assert "(uint8)" not in run("plan", "show", str(planned(tmp_path, "b.yaml", **given)))[1]


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


@pytest.mark.parametrize("text", ["hello", "name: machine\nnodes: []\n", "{}"])
def test_file_that_is_no_plan_is_said_to_be_none_in_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.yaml"
    file.write_text(text)
    code, _, said = run("plan", "show", str(file))
    assert code == 2
    assert said.startswith(f"cxl-offload: error: {file}: this is no plan; `cxl-offload plan inf")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("name: x\na: [\n", 3, "not YAML: expected the node content"),
        ("name: x\nb: 'open\n", 3, "not YAML: found unexpected end of stream"),
        ("name: x\n\tb: 1\n", 2, "not YAML: found character"),
        ("executor: flexgen\na: [\n", 3, "not YAML: expected the node content"),
        ("", 1, "the file is empty"),
    ],
)
def test_file_that_is_no_yaml_is_refused_with_its_line(
    tmp_path: Path, text: str, line: int, why: str
) -> None:
    file = tmp_path / "other.yaml"
    file.write_text(text)
    code, _, said = run("plan", "show", str(file))
    assert code == 2
    assert said.startswith(f"cxl-offload: error: {file}:{line}: {why}")
    assert said.count("\n") == 1


def test_key_that_no_plan_has_is_refused_with_every_known_key_once(tmp_path: Path) -> None:
    file = planned(tmp_path, "a.yaml")
    file.write_text(file.read_text() + "zzz: 1\n")
    said = run("plan", "show", str(file))[2]
    assert said.count(" version,") == 1


def test_comparison_is_in_words_and_its_json_in_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    homes = (Home(kind="kv", where="ldram", percent=100.0, bytes=3 << 30, policy="bind:ldram"),)
    first = str(planned(tmp_path, "a.yaml", homes=homes))
    second = str(planned(tmp_path, "b.yaml", homes=homes, tokens_per_s=75.0))
    out = run("plan", "compare", first, second)[1]
    assert f"second: {second}\n" in out  # however long it is
    words = " ".join(out.split())
    assert "keys and values (kv) local DRAM 3 GiB local DRAM 3 GiB" in words
    assert "The second is 50.0% faster than the first (predicted)." in words
    found = json.loads(run("plan", "compare", first, second, "--json")[1])
    assert found["rows"]["kv"] == ["ldram 3 GiB", "ldram 3 GiB"]


@pytest.mark.parametrize(
    ("executor", "command", "said"),
    [
        ("flexgen", "cxl-offload flexgen --plan plan.yaml --model opt-30b",
         "looks for in ~/opt_weights/opt-30b-np; nothing is downloaded"),
        ("flexgen", "cxl-offload flexgen --plan plan.yaml --model opt-30b --path /w",
         "looks for in /w/opt-30b-np"),
        ("transformers", "cxl-offload generate --plan plan.yaml --model llama --prompts p.txt",
         "name your folder of them after --model, with its config.json and *.safetensors"),
        ("transformers", "cxl-offload generate --plan plan.yaml --machine mine --prompts p.txt",
         "On mine itself leave --machine out: it puts everything on simulated nodes."),
        ("vllm", "vllm serve llama-3-8b --dtype auto", "name on the Hugging Face hub"),
        ("deepspeed", "deepspeed --num_gpus=1 mine.py --deepspeed_config ds_config.json",
         "mine.py is your training script"),
    ],
)  # fmt: skip
def test_printed_command_says_which_folders_it_needs(
    tmp_path: Path, executor: str, command: str, said: str
) -> None:
    kind = "training" if executor == "deepspeed" else "inference"
    made = {"kind": kind, "executor": executor, "command": tuple(command.split())}
    text = " ".join(run("plan", "show", str(planned(tmp_path, "a.yaml", **made)))[1].split())
    assert said in text


@pytest.mark.parametrize("written", [False, True])
def test_training_says_once_who_reads_its_plan(tmp_path: Path, written: bool) -> None:
    asked = ["plan", "training", "--model", "opt-125m", "--machine", "epyc9354-cxl-a"]
    output = ["--output", str(tmp_path / "plan.yaml")] if written else []
    text = " ".join(run(*asked, "--batch", "1", "--seq-len", "128", *output)[1].split())
    reads = "`cxl-offload run` reads the plan: write it with --output plan.yaml."
    assert (reads in text) is not written


def test_folder_that_is_there_needs_no_words(tmp_path: Path) -> None:
    command = ("cxl-offload", "flexgen", "--plan", "plan.yaml", "--model", str(tmp_path))
    assert (
        "looks for" not in run("plan", "show", str(planned(tmp_path, "a.yaml", command=command)))[1]
    )


def test_terms_that_take_no_time_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    terms = {"hidden loads": 1.49e-19, "CPU work": 2.0}
    phase = PhaseEstimate(name="decode", seconds=2.0, bottleneck="CPU work", terms=terms)
    text = run("plan", "show", str(planned(tmp_path, "a.yaml", phases=(phase,))))[1]
    assert "CPU work: 2 s" in text
    assert "hidden loads" not in text


def test_missing_package_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith("cxl_offload.plan.") and "plan_file" not in name:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "highspy", None)
    code, _, said = run("plan", "training", "--model", "gpt2", "--machine", "epyc9354-cxl-a")
    assert code == 2
    assert "needs the Python package 'highspy', which is not installed: pip install highspy" in said


def test_module_without_successor_is_no_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_plan(_: Path) -> object:
        return importlib.import_module("cxl_offload.sim.sharing")

    monkeypatch.setattr("cxl_offload.plan.plan_file.load_plan", load_plan)
    code, _, said = run("plan", "show", str(planned(tmp_path, "a.yaml")))
    assert code == 2
    assert "sim.sharing is gone: cxl_offload.sim.replay shares resources in the core" in said
    assert "pip install" not in said


def test_costs_are_printed_with_their_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    words = ("--rl-d", "0.1", "--rl-c", "0.125", "--c", "2", "--r-t", "1.1", "--n-baseline", "10")
    text = run("tco", *words, "--server-cost", "7")[1]
    assert "saving, of the cost without CXL" in text
    assert "cost without CXL (currency of --server-cost)" in text
