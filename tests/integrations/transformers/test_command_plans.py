"""``cxl-offload generate --plan``: a plan is run as it says, or refused where it does not fit."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cxl_offload import _C
from cxl_offload.integrations import fit
from cxl_offload.integrations.transformers import generation, load, offload
from cxl_offload.integrations.transformers.plans import policies_of, weights_as
from cxl_offload.memory import Session, as_policy
from cxl_offload.plan.plan_file import Batch, load_plan, save_plan
from cxl_offload.topology import load_machine

from .commands import MACHINE, command, run
from .fake_accelerator import FakeCopies, fake_accelerator
from .models import make

PLANNED = {"attention": "bind:rdram", "mlp": "weighted:ldram=1,cxl=1@4KiB", "kv": "bind:cxl"}


@pytest.fixture(scope="module")
def plan_file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by the planner, for the CPUs of a machine; two rows in turn."""
    made = tmp_path_factory.mktemp("plan") / "made.yaml"
    given = ["--model", str(folder), "--machine", MACHINE, "--executor", "transformers"]
    lengths = ["--prompt-len", "8", "--gen-len", "5", "--gpu", "none"]
    assert run(["plan", "inference", *given, *lengths, "--output", str(made)]) == 0
    plan = load_plan(made)
    batch = replace(plan.batch, size=1, count=2)
    save_plan(replace(plan, policies={**plan.policies, **PLANNED}, batch=batch), made)
    return made


def test_plan_is_run_as_it_says(
    folder: Path, plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, file = load_plan(plan_file), tmp_path / "report.json"
    assert run(command(folder, "--plan", str(plan_file), "--output", str(file))) == 0
    report = json.loads(file.read_text())
    assert report["gen_len"] == 5
    assert report["predicted"]["tokens_per_s"] == pytest.approx(plan.tokens_per_s)
    assert report["attention"]["prompt"] == 2 * 2  # two layers, two rows
    granted = {row["kind"]: set(row["granted_bytes_per_tier"]) for row in report["placement"]}
    assert granted.keys() == policies_of(plan).keys() >= {"embedding", *PLANNED}
    planned = {kind: granted[kind] for kind in PLANNED}
    assert planned == {"attention": {"rdram"}, "mlp": {"ldram", "cxl"}, "kv": {"cxl"}}
    said = " ".join(capsys.readouterr().out.split())
    assert "the plan predicted" in said
    assert report["prompt_len"] != 8  # what was planned
    assert (
        "planned for 2 sequences of 8 + 5 tokens, this run had 2 of "
        f"{report['prompt_len']} + 5: not comparable."
    ) in said


def test_plan_of_another_model_and_machine_is_not_compared(
    folder: Path, plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = replace(load_plan(plan_file), model="llama-2-7b", machine="spr-1")
    save_plan(other, tmp_path / "other.yaml")
    assert run(command(folder, "--plan", str(tmp_path / "other.yaml"))) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "tokens, model llama-2-7b, machine spr-1, this run had" in said
    assert f"model {folder.name}, machine {MACHINE}: not comparable." in said


def test_cache_is_kept_as_the_plan_says(
    folder: Path, plan_file: Path, tmp_path: Path, session: Session
) -> None:
    planned, file = tmp_path / "int4.yaml", tmp_path / "report.json"
    save_plan(replace(load_plan(plan_file), kv_dtype="int4"), planned)

    def kv_bytes(*more: str) -> int:
        more = ("--plan", str(planned), "--gen-len", "6", "--output", str(file), *more)
        assert run(command(folder, *more)) == 0
        rows = json.loads(file.read_text())["placement"]
        return int(next(row["requested_bytes"] for row in rows if row["kind"] == "kv"))

    assert kv_bytes() == kv_bytes("--kv-dtype", "int4")
    assert kv_bytes() * 16 == kv_bytes("--kv-dtype", "float8_e5m2") * 36  # 16 numbers a head
    with offload(make("llama"), planned, session=session) as done:
        assert done._kv.dtype == "int4"
    planned.write_text(planned.read_text().replace("kv_dtype: int4", "kv_dtype: int3"))
    assert run(command(folder, "--plan", str(planned))) != 0


def test_place_and_rows_at_once_go_before_the_plan(
    folder: Path, plan_file: Path, tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    more = ("--plan", str(plan_file), "--place", "kv=bind:rdram", "--rows-at-once", "2")
    assert run(command(folder, *more, "--gen-len", "3", "--output", str(file))) == 0
    report = json.loads(file.read_text())
    granted = {row["kind"]: set(row["granted_bytes_per_tier"]) for row in report["placement"]}
    assert granted["kv"] == granted["attention"] == {"rdram"}
    assert report["attention"]["prompt"] == 2
    assert report["gen_len"] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"executor": "vllm"}, "a plan for vllm"),
        ({"batch": Batch(size=1, count=1, prompt=8, tokens=5)}, "2 prompts, and the plan is of 1"),
    ],
)
def test_plan_that_does_not_fit_is_refused_in_one_line(
    folder: Path,
    plan_file: Path,
    tmp_path: Path,
    change: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_plan(replace(load_plan(plan_file), **change), tmp_path / "odd.yaml")
    assert run(command(folder, "--plan", str(tmp_path / "odd.yaml"))) != 0
    said = capsys.readouterr().err.strip()
    assert message in said
    assert len(said.splitlines()) == 1


def test_weights_have_the_type_that_the_plan_counts_with(
    folder: Path, plan_file: Path, tmp_path: Path
) -> None:
    """It is in the command that a plan for CPUs prints; another that is asked for goes before."""
    plan = load_plan(plan_file)
    assert plan.dtype == "bfloat16"
    session = Session.simulated(load_machine(MACHINE))
    assert load(folder, plan_file, session=session).dtype is torch.bfloat16
    assert load(folder, plan, dtype="float16", session=session).dtype is torch.float16
    assert weights_as("auto", None) == "auto"
    assert weights_as("auto", replace(plan, command=plan.command[:2])) == "auto"
    before = sum(
        each.nbytes for layer in make("llama").model.layers for each in layer.mlp.parameters()
    )
    assert _placed(folder, plan_file, tmp_path) == before / 2
    assert _placed(folder, plan_file, tmp_path, "--dtype", "float32") == before


def _placed(folder: Path, plan_file: Path, tmp_path: Path, *more: str) -> int:
    """Bytes of the kind mlp in a run of the plan."""
    out = tmp_path / "placed.json"
    assert run(command(folder, "--plan", str(plan_file), "--output", str(out), *more)) == 0
    placement = json.loads(out.read_text())["placement"]
    return sum(row["requested_bytes"] for row in placement if row["kind"] == "mlp")


def test_plan_and_its_file_serve_as_policies(folder: Path, plan_file: Path) -> None:
    plan = load_plan(plan_file)
    session = Session.simulated(load_machine(MACHINE))
    model = load(folder, plan, session=session)
    with offload(model, replace(plan, batch=replace(plan.batch, size=2)), session=session) as done:
        assert done.rows_at_once == 2
        assert {kind: str(parts[0].policy) for kind, parts in done.store.parts.items()} == {
            kind: str(as_policy(text, session.machine)) for kind, text in policies_of(plan).items()
        }
    with offload(model, plan_file, rows_at_once=3, session=session) as done:
        assert done.rows_at_once == 3
    del model, done
    gc.collect()
    assert session.stats().asked_bytes.current == 0


def test_plan_for_a_gpu_is_run_there_without_being_told(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The GPU is one that is not there; the plan's own command names it too."""
    file, made, driver = tmp_path / "report.json", tmp_path / "gpu.yaml", _C.FakeDriver()
    given = ["--model", str(folder), "--machine", MACHINE, "--executor", "transformers"]
    lengths = ["--prompt-len", "8", "--gen-len", "5", "--gpu-usable", "0.00001"]
    assert run(["plan", "inference", *given, *lengths, "--output", str(made)]) == 0
    plan = load_plan(made)
    assert plan.command[plan.command.index("--accelerator") + 1] == "cuda"
    asked = command(folder, "--plan", str(made), "--gen-len", "6", "--output", str(file))
    capsys.readouterr()
    assert run(asked) == 2
    said = capsys.readouterr().err.strip()
    assert "finds no CUDA device" in said
    assert "the plan is for one; for CPUs plan again, with cxl-offload plan inference --gpu" in said
    assert run([*asked, "--accelerator", "cpu"]) == 2
    assert "leave accelerator out" not in (said + capsys.readouterr().err)
    shares = {"mlp": "gpu:0.5,cxl", "attention": "ldram", "kv": "gpu:0.5,ldram"}
    save_plan(replace(plan, policies={**plan.policies, **shares}), made)
    session = Session.simulated(load_machine(MACHINE), driver=driver)
    monkeypatch.setattr(fit, "session_on", lambda *_: session)
    fake_accelerator(monkeypatch, lambda session: FakeCopies(session, driver))
    assert run(asked) == 0
    report = json.loads(file.read_text())
    assert report["accelerator"] == "cpu"  # what stands for it here
    assert report["attention"]["joined"] > 0
    rows = {(row["kind"], row["part"]): row["requested_bytes"] for row in report["placement"]}
    assert rows["kv", "accelerator"] == pytest.approx(rows["kv", "host"], rel=0.2)
    layers = [(layer.mlp, layer.self_attn) for layer in make("llama").model.layers]
    mlp, attention = (sum(each.nbytes for each in part.parameters()) for part in layers[0])
    assert len(layers) == 2
    assert rows["mlp", "host"] == mlp  # of one layer; the other stays
    assert rows["attention", "host"] == 2 * attention
    assert run(command(folder, "--place", "kv=ldram", "--gen-len", "6", "--output", str(file))) == 0
    assert json.loads(file.read_text())["tokens"] == report["tokens"]


@pytest.mark.parametrize("place", [None, "gpu"])
def test_cache_that_rows_in_turn_cannot_use_is_refused_before_loading(
    place: str | None,
    folder: Path,
    plan_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, made, plan = _C.FakeDriver(), tmp_path / "gpu.yaml", load_plan(plan_file)
    policies = {kind: text for kind, text in plan.policies.items() if kind != "kv"}
    words = (*plan.command, "--accelerator", "cuda")
    save_plan(replace(plan, policies=policies, command=words), made)
    session = Session.simulated(load_machine(MACHINE), driver=driver)
    monkeypatch.setattr(fit, "session_on", lambda *_: session)
    fake_accelerator(monkeypatch, lambda session: FakeCopies(session, driver))
    asked = command(folder, "--plan", str(made))
    with monkeypatch.context() as patched:
        patched.setattr(generation, "load", lambda *_, **__: pytest.fail("loaded"))
        assert run([*asked, *([] if place is None else ["--place", f"kv={place}"])]) == 2
    said = capsys.readouterr().err.strip()
    assert "the plan's batches of 1: rows in turn need a policy of kv" in said
    assert ("--place kv=gpu is none" if place else "it has no policy") in said
    assert "--place kv=gpu:1,bind:ldram for all of it on the accelerator" in said
    assert run([*asked, "--place", "kv=gpu:1,bind:ldram"]) == 0, "what it names works"
    assert run(command(folder, "--place", "weights=ldram", "--rows-at-once", "1")) == 2
    said = capsys.readouterr().err.strip()
    assert "--rows-at-once 1: rows in turn" in said
    assert said.endswith("give --place kv=bind:ldram")
