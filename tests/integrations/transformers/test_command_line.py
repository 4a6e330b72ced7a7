"""``cxl-offload generate`` from the folder to the report, and what it refuses before it loads."""

from __future__ import annotations

import gc
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig, PreTrainedTokenizerFast

from cxl_offload import _C
from cxl_offload.cli.main import main
from cxl_offload.integrations import fit
from cxl_offload.integrations.transformers import generation, load, offload
from cxl_offload.integrations.transformers import weights as weights_module
from cxl_offload.integrations.transformers.plans import policies_of
from cxl_offload.memory import Session, as_policy
from cxl_offload.ops.measured_linear import MeasuredLinear
from cxl_offload.plan.plan_file import Batch, load_plan, save_plan
from cxl_offload.topology import load_machine

from .fake_accelerator import FakeCopies, fake_accelerator
from .models import VOCAB, make

MACHINE = "epyc9354-cxl-a"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA whose words are numbers, and prompts of different lengths."""
    made = tmp_path_factory.mktemp("model")
    make("llama").save_pretrained(made)
    words = Tokenizer(WordLevel({str(at): at for at in range(VOCAB)}, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="1").save_pretrained(made)
    (made / "prompts.txt").write_text("40 41 42 43 44\n\n90 91\n")
    return made


def command(folder: Path, *more: str) -> list[str]:
    prompts = str(folder / "prompts.txt")
    return ["generate", "--model", str(folder), "--prompts", prompts, "--machine", MACHINE, *more]


def run(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def test_report_says_what_stock_generates_and_where_it_lay(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ("--place", "weights=bind:ldram", "--place", "kv=cxl", "--place", "mlp=bind:cxl")
    file = tmp_path / "report.json"
    assert run(command(folder, *places, "--gen-len", "6", "--json", str(file))) == 0
    report = json.loads(file.read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    prompts = (folder / "prompts.txt").read_text().split("\n\n")
    inputs = tokenizer([line.strip() for line in prompts], padding=True, return_tensors="pt")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    assert 0 < (mask == 0).sum() < mask.shape[1]
    stock = AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = stock.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert report["tokens"] == expected.tolist()
    asked = {row["kind"]: row["requested_bytes"] for row in report["placement"]}
    assert sum(asked.values()) - asked["kv"] == sum(w.nbytes for w in stock.parameters())
    assert asked["kv"] == 2 * 2 * 2 * (ids.shape[1] + 6 - 1) * 2 * 16 * 4
    tiers = {row["kind"]: set(row["granted_bytes_per_tier"]) for row in report["placement"]}
    assert tiers["kv"] == tiers["mlp"] == {"cxl"}
    assert tiers["attention"] == {"ldram"}
    shown = capsys.readouterr().out
    assert "Where the bytes are" in shown
    assert "decode" in shown
    answer = tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
    assert f"0: {answer}" in shown


def test_page_of_a_run_says_what_was_granted_and_how_fast(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    places = ("--place", "kv=cxl", "--gen-len", "2", "--report", str(page))
    assert run(command(folder, *places)) == 0
    text = page.read_text()
    assert "Requested against granted" in text
    assert re.search(r"<td>kv</td><td>bind:\d</td><td class=\"n\">[\d.]+ KiB</td>", text)
    assert "measured" in text


def test_place_that_differs_from_its_policy_is_said_with_the_reason(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stripe that no tensor of this model fills: all of it goes to the node of most weight."""
    file, page = tmp_path / "report.json", tmp_path / "run.html"
    places = ("--place", "kv=weighted:ldram=3,cxl=1@2MiB", "--gen-len", "2")
    assert run(command(folder, *places, "--json", str(file), "--report", str(page))) == 0
    (note,) = {re.sub("kv: .* is less", "kv: less", each) for each in noted(file)}
    assert note.startswith("kv: less than one cycle of the interleave")
    assert "less than one cycle of the interleave" in page.read_text()
    assert "Note: kv: " in capsys.readouterr().out
    exact = ("--place", "kv=bind:cxl", "--gen-len", "2")
    assert run(command(folder, *exact, "--json", str(file))) == 0
    assert noted(file) == []


def noted(report: Path) -> list[str]:
    return list(json.loads(report.read_text())["placement_notes"])


def test_json_of_a_dash_is_all_that_is_printed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command(folder, "--place", "kv=cxl", "--gen-len", "2", "--json", "-")) == 0
    assert json.loads(capsys.readouterr().out)["gen_len"] == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--place", "kvs=cxl"), "kind 'kvs'"),
        (("--place", "kv=attic"), "'attic' is neither a node id nor a tier"),
        (("--place", "kv"), "expected KIND=POLICY"),
        (("--place", "kv=cxl", "--place", "kv=ldram"), "kv is given twice"),
        ((), "--place: name at least one kind"),
        (("--place", "kv=cxl", "--gen-len", "600"), "512 positions"),
        (("--place", "kv=cxl", "--prompts", "nowhere.txt"), "nowhere.txt"),
        (("--place", "kv=cxl", "--model", "nowhere"), "nowhere"),
        (("--place", "kv=cxl", "--attention", "flash"), "flash"),
        (("--place", "kv=cxl", "--dtype", "float3"), "float3"),
        (("--place", "kv=cxl", "--kv-dtype", "int3"), "kv_dtype int3"),
    ],
)
def test_bad_input_is_one_line_before_the_model_loads(
    folder: Path,
    more: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("loaded")
    )
    assert run(command(folder, *more)) != 0
    said = capsys.readouterr().err.strip()
    assert message in said
    assert len(said.splitlines()) == 1


def test_limit_of_a_tier_is_refused_before_the_model_loads_and_kept_where_it_is_enough(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ("--place", "weights=bind:ldram", "--place", "kv=cxl", "--gen-len", "2")
    assert run(command(folder, *places, "--limit", "cxl=64B")) != 0
    said = capsys.readouterr().err.strip()
    assert "tier cxl: " in said
    assert "(kv " in said
    assert "capacity 64 B" in said
    assert run(command(folder, *places, "--limit", "cxl=1GiB")) == 0
    assert run(command(folder, *places, "--limit", "fast=1GiB")) != 0
    assert "no tier 'fast'" in capsys.readouterr().err


def test_full_tier_is_said_before_the_model_loads(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of 40 TB by its configuration; its weights are never looked for."""
    large = tmp_path / "large"
    shutil.copytree(folder, large)
    config = json.loads((large / "config.json").read_text())
    config |= {"hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 60}
    config |= {"num_attention_heads": 512, "num_key_value_heads": 512, "head_dim": 128}
    (large / "config.json").write_text(json.dumps(config))
    assert run(command(large, "--place", "weights=cxl", "--place", "kv=ldram")) != 0
    said = capsys.readouterr().err.strip()
    assert "node 2" in said
    assert "attention" in said
    assert len(said.splitlines()) == 1


def test_model_against_the_conventions_is_refused_before_it_loads(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = tmp_path / "bloom"
    shutil.copytree(folder, odd)
    BloomConfig(n_layer=1, n_head=4, hidden_size=64, vocab_size=VOCAB).save_pretrained(odd)
    assert run(command(odd, "--place", "kv=cxl")) != 0
    assert "AttentionInterface" in capsys.readouterr().err


PLANNED = {"attention": "bind:rdram", "mlp": "weighted:ldram=3,cxl=1@4KiB", "kv": "bind:cxl"}


@pytest.fixture(scope="module")
def plan_file(folder: Path) -> Path:
    """Made by the planner, as if this tiny model did not fit the accelerator; two rows in turn."""
    made = folder / "made.yaml"
    given = ["--model", str(folder), "--machine", MACHINE, "--executor", "transformers"]
    lengths = ["--prompt-len", "8", "--gen-len", "5", "--gpu-usable", "0.00001"]
    assert run(["plan", "inference", *given, *lengths, "--output", str(made)]) == 0
    plan = load_plan(made)
    batch = replace(plan.batch, size=1, count=2)
    save_plan(replace(plan, policies={**plan.policies, **PLANNED}, batch=batch), made)
    return made


def test_plan_is_run_as_it_says(
    folder: Path, plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, file = load_plan(plan_file), tmp_path / "report.json"
    assert run(command(folder, "--plan", str(plan_file), "--json", str(file))) == 0
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


@pytest.mark.parametrize(("kept", "position"), [("float8_e5m2", 16), ("int4", 36)])
def test_cache_is_kept_as_asked(folder: Path, tmp_path: Path, kept: str, position: int) -> None:
    file = tmp_path / "report.json"
    more = ("--place", "kv=cxl", "--kv-dtype", kept, "--gen-len", "6", "--json", str(file))
    assert run(command(folder, *more)) == 0
    report = json.loads(file.read_text())
    positions = report["prompt_len"] + 6 - 1
    assert report["placement"][0]["requested_bytes"] == 2 * 2 * 2 * 2 * positions * position


def test_cache_is_kept_as_the_plan_says(
    folder: Path, plan_file: Path, tmp_path: Path, session: Session
) -> None:
    planned, file = tmp_path / "int4.yaml", tmp_path / "report.json"
    save_plan(replace(load_plan(plan_file), kv_dtype="int4"), planned)

    def kv_bytes(*more: str) -> int:
        more = ("--plan", str(planned), "--gen-len", "6", "--json", str(file), *more)
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
    assert run(command(folder, *more, "--gen-len", "3", "--json", str(file))) == 0
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
        ({"policies": {"kv": "gpu"}}, "keeps all of model"),
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


def test_whole_sequences_take_pages_of_their_own(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    places = ("--place", "kv=weighted:ldram=1,cxl=1@4KiB", "--gen-len", "3")
    assert run(command(folder, *places, "--whole-sequences", "--json", str(file))) == 0
    (row,) = json.loads(file.read_text())["placement"]
    # Keys and values of two layers, each of two rows; a row of them is less than a page.
    assert row["requested_bytes"] == 2 * 2 * 2 * 4096
    assert set(row["granted_bytes_per_tier"].values()) == {4 * 4096}


def test_second_run_of_the_same_prompts_computes_only_their_rest(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    words = [str(word) for word in range(20, VOCAB) if "1" not in str(word)]  # 1 is the padding
    text = " ".join(words[:40])
    prompts.write_text(f"{text} 90 92\n5 6 7 {text}\n")
    options = ["--place", "kv=cxl", "--persist", "chat", "--persist-bytes", "1MiB"]
    options += ["--persist-folder", str(tmp_path), "--prompts", str(prompts), "--gen-len", "4"]
    plain = tmp_path / "plain.json"
    assert run(command(folder, *options[:2], *options[-4:], "--json", str(plain))) == 0
    expected = json.loads(plain.read_text())
    assert expected["prefixes"] is None
    for found in (0, 31 + 32):
        file = tmp_path / "report.json"
        assert run(command(folder, *options, "--json", str(file))) == 0
        report = json.loads(file.read_text())
        assert report["tokens"] == expected["tokens"]
        assert report["prefixes"]["found_tokens"] == found
    assert "Prompt tokens whose KV was found: 63 of 85 (74%)" in capsys.readouterr().out
    assert run(["kv", "list", "--folder", str(tmp_path), "--json"]) == 0
    (store,) = json.loads(capsys.readouterr().out)["kept"]
    assert (store["name"], store["blocks"], store["facts"]["model"]) == ("chat", 4, folder.name)
    assert run(["kv", "verify", "--folder", str(tmp_path), "chat"]) == 0
    assert "4 right, 0 damaged" in capsys.readouterr().out
    assert run(["kv", "drop", "--folder", str(tmp_path), "chat"]) == 0
    assert not list(tmp_path.glob("*.kv"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--persist-bytes", "1GiB"], "do nothing without --persist"),
        (["--persist-bytes", ""], "do nothing without --persist"),
        (["--persist-folder", ""], "do nothing without --persist"),
        (["--persist", "chat", "--persist-bytes", ""], "bytes ''"),
        (["--persist", "chat", "--persist-folder", ""], "an empty text is no folder"),
        (["--persist", "a/b"], "without a slash"),
        (["--persist", "chat", "--persist-bytes", "1KiB"], "a block of 16 tokens takes 8 KiB"),
        (["--persist", "chat", "--kv-dtype", "int4"], "do not go with kv_dtype"),
        (["--persist", "chat", "--persist-folder", "no/folder"], "there is no such folder"),
    ],
)
def test_prefixes_that_cannot_be_kept_are_one_line(
    options: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command(folder, "--place", "kv=cxl", *options)) != 0
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line


def test_linear_layers_are_computed_by_whoever_is_fastest(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, timed = tmp_path / "report.json", Mock(return_value=["kernel"])
    monkeypatch.setattr(MeasuredLinear, "_hopeful", timed)
    asked = ("--place", "kv=ldram", "--gen-len", "4", "--json", str(file))
    assert run(command(folder, *asked)) == 0
    expected = json.loads(file.read_text())["tokens"]
    assert not timed.called
    assert run(command(folder, *asked, "--cpu-linear", "fastest")) == 0
    assert timed.called
    assert json.loads(file.read_text())["tokens"] == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cpu-linear", "half"], "--cpu-linear half: must be torch or fastest"),
        (["--cpu-linear", "fastest", "--accelerator", "cuda"], "cuda computes the layers"),
    ],
)
def test_linear_layers_that_cannot_be_so_are_one_line(
    options: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command(folder, "--place", "weights=cxl", *options)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_accelerator_that_is_not_there_is_refused_before_the_model_loads(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "load", None)  # would be called
    assert run(command(folder, "--place", "weights=cxl", "--accelerator", "cuda")) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "accelerator cuda: torch" in said
    assert "finds no CUDA device" in said


def test_accelerator_streams_weights_and_is_named_in_the_report(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside a run on the CPU; the accelerator is one that is not there."""
    driver, file = _C.FakeDriver(), tmp_path / "report.json"
    places = ("--place", "weights=cxl", "--place", "norm=gpu", "--place", "kv=ldram")
    asked = ("--gen-len", "6", "--json", str(file))
    assert run(command(folder, "--place", "weights=cxl", *asked)) == 0
    expected = json.loads(file.read_text())
    assert expected["accelerator"] is None
    session = Session.simulated(load_machine(MACHINE), driver=driver)
    monkeypatch.setattr(fit, "session_on", lambda *_: session)
    fake_accelerator(monkeypatch, lambda session: FakeCopies(session, driver))
    capsys.readouterr()
    assert run(command(folder, *places, *asked, "--accelerator", "cuda")) == 0
    report = json.loads(file.read_text())
    assert report["tokens"] == expected["tokens"]
    assert report["accelerator"] == "cpu"  # what stands for it here
    assert "norm" not in {row["kind"] for row in report["placement"]}
    assert "tokens; on cpu; simulated nodes" in " ".join(capsys.readouterr().out.split())
    assert driver.copied_bytes > report["parameters"] * 4


def test_accelerator_without_room_is_refused_before_the_model_loads(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = _C.FakeDriver()
    fake_accelerator(monkeypatch, lambda session: FakeCopies(session, driver), free=1000)
    monkeypatch.setattr(generation, "load", None)  # would be called
    assert run(command(folder, "--place", "weights=cxl", "--accelerator", "cuda")) == 2
    assert "which has 1000 B left" in " ".join(capsys.readouterr().err.split())


def test_answers_and_report_are_not_lost_to_a_trace_that_cannot_be_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    more = ("--place", "kv=cxl", "--gen-len", "2", "--trace", "/dev/full", "--json", str(file))
    assert run(command(folder, *more)) == 2
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == ("cxl-offload: error: /dev/full: No space left on device")
    assert "Answers" in said.out
    assert "Where the bytes are" in said.out
    assert json.loads(file.read_text())["gen_len"] == 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["/dev/zero", "/dev/full"])
def test_prompts_without_an_end_are_refused(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["generate", "--model", str(folder), "--prompts", name, "--place", "kv=cxl"]
    assert run(prompts) == 2
    assert f"--prompts {name}: is a device, not a file" in capsys.readouterr().err


def damaged(folder: Path, at: Path, **config: Any) -> Path:
    """A copy of a checkpoint whose configuration says something else."""
    shutil.copytree(folder, at)
    said = json.loads((at / "config.json").read_text())
    (at / "config.json").write_text(json.dumps({**said, **config}))
    return at


def refused(model: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    capsys.readouterr()
    assert run(command(model, "--place", "kv=cxl", "--gen-len", "2", *more)) == 2
    (line,) = (each for each in capsys.readouterr().err.splitlines() if "%" not in each)
    assert str(model) in line
    return line


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 32),
        ("vocab_size", 5),
        ("num_attention_heads", 0),
        ("dtype", "foo"),
        ("num_hidden_layers", "x"),
    ],
)
def test_configuration_that_is_wrong_is_one_line(
    field: str, value: object, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(damaged(folder, tmp_path / "model", **{field: value}), capsys)
    if field in ("hidden_size", "vocab_size"):
        assert "the weights are not those that config.json describes: " in line
        assert "weight" in line


def test_configuration_nested_without_end_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = damaged(folder, tmp_path / "model")
    (model / "config.json").write_text("[" * 100_000)
    refused(model, capsys)


@pytest.mark.parametrize("keep", [0, 6, 5000, 0.9])
def test_weights_that_were_cut_are_one_line_with_their_file(
    keep: float, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = damaged(folder, tmp_path / "model")
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: int(keep * len(whole) if isinstance(keep, float) else keep)])
    assert f"{weights}: " in refused(model, capsys)
    weights.write_bytes(b"no weights" * 1000)
    assert f"{weights}: " in refused(model, capsys)


def test_attention_that_is_not_installed_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "FlashAttention" in refused(folder, capsys, "--attention", "flash_attention_2")


def test_error_of_this_package_while_weights_are_loaded_keeps_its_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "kind_of_weight", lambda *_: {}["a fault of ours"])
    with pytest.raises(KeyError, match="a fault of ours"):
        load(folder, {"weights": "first-touch"})


def test_type_of_a_cache_that_has_no_place_is_checked_before_weights_are_loaded(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    assert run(command(folder, "--place", "weights=cxl", "--kv-dtype", "foo")) == 2
    assert "kv_dtype foo" in capsys.readouterr().err


def test_ranks_are_checked_without_torchrun(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command(folder, "--place", "kv=cxl", "--ranks", "foo")) == 2
    assert "--ranks foo: rows or tensors" in capsys.readouterr().err
