"""``cxl-offload generate`` from the folder to the report."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cxl_offload import _C
from cxl_offload.integrations import fit
from cxl_offload.integrations.transformers import generation
from cxl_offload.integrations.transformers.token_clock import TokenClock
from cxl_offload.kept import kept_path
from cxl_offload.memory import Session
from cxl_offload.ops.measured_linear import MeasuredLinear
from cxl_offload.topology import load_machine

from .commands import MACHINE, command, run
from .models import VOCAB


def test_report_says_what_stock_generates_and_where_it_lay(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ("--place", "weights=bind:ldram", "--place", "kv=cxl", "--place", "mlp=bind:cxl")
    file = tmp_path / "report.json"
    assert run(command(folder, *places, "--gen-len", "6", "--output", str(file))) == 0
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
    assert run(command(folder, *places, "--output", str(file), "--report", str(page))) == 0
    (note,) = {re.sub("kv: .* is less", "kv: less", each) for each in noted(file)}
    assert note.startswith("kv: less than one cycle of the interleave")
    assert "less than one cycle of the interleave" in page.read_text()
    assert "Note: kv: " in capsys.readouterr().out
    exact = ("--place", "kv=bind:cxl", "--gen-len", "2")
    assert run(command(folder, *exact, "--output", str(file))) == 0
    assert noted(file) == []


def noted(report: Path) -> list[str]:
    return list(json.loads(report.read_text())["placement_notes"])


def test_json_of_a_dash_is_all_that_is_printed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command(folder, "--place", "kv=cxl", "--gen-len", "2", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["gen_len"] == 2


@pytest.mark.parametrize(("kept", "position"), [("float8_e5m2", 16), ("int4", 36)])
def test_cache_is_kept_as_asked(folder: Path, tmp_path: Path, kept: str, position: int) -> None:
    file = tmp_path / "report.json"
    more = ("--place", "kv=cxl", "--kv-dtype", kept, "--gen-len", "6", "--output", str(file))
    assert run(command(folder, *more)) == 0
    report = json.loads(file.read_text())
    positions = report["prompt_len"] + 6 - 1
    assert report["placement"][0]["requested_bytes"] == 2 * 2 * 2 * 2 * positions * position


def test_whole_sequences_take_pages_of_their_own(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    places = ("--place", "kv=weighted:ldram=1,cxl=1@4KiB", "--gen-len", "3")
    assert run(command(folder, *places, "--whole-sequences", "--output", str(file))) == 0
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
    assert run(command(folder, *options[:2], *options[-4:], "--output", str(plain))) == 0
    expected = json.loads(plain.read_text())
    assert expected["prefixes"] is None
    for found in (0, 31 + 32):
        file = tmp_path / "report.json"
        assert run(command(folder, *options, "--output", str(file))) == 0
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


def test_linear_layers_are_computed_by_whoever_is_fastest(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, timed = tmp_path / "report.json", Mock(return_value=["kernel"])
    monkeypatch.setattr(MeasuredLinear, "_hopeful", timed)
    asked = ("--place", "kv=ldram", "--gen-len", "4", "--output", str(file))
    assert run(command(folder, *asked)) == 0
    expected = json.loads(file.read_text())["tokens"]
    assert not timed.called
    assert run(command(folder, *asked, "--cpu-linear", "fastest")) == 0
    assert timed.called
    assert json.loads(file.read_text())["tokens"] == expected


def test_accelerator_streams_weights_and_is_named_in_the_report(
    folder: Path,
    tmp_path: Path,
    driver: _C.FakeDriver,
    accelerator: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside a run on the CPU; the accelerator is one that is not there."""
    file = tmp_path / "report.json"
    places = ("--place", "weights=cxl", "--place", "norm=gpu", "--place", "kv=ldram")
    asked = ("--gen-len", "6", "--output", str(file))
    assert run(command(folder, "--place", "weights=cxl", *asked)) == 0
    expected = json.loads(file.read_text())
    assert expected["accelerator"] is None
    session = Session.simulated(load_machine(MACHINE), driver=driver)
    monkeypatch.setattr(fit, "session_on", lambda *_: session)
    capsys.readouterr()
    assert run(command(folder, *places, *asked, "--accelerator", accelerator)) == 0
    report = json.loads(file.read_text())
    assert report["tokens"] == expected["tokens"]
    assert report["accelerator"] == "cpu"  # what stands for it here
    assert "norm" not in {row["kind"] for row in report["placement"]}
    assert "tokens; on cpu; simulated nodes" in " ".join(capsys.readouterr().out.split())
    assert driver.copied_bytes > report["parameters"] * 4


def test_share_of_the_cache_on_the_accelerator_has_its_row_in_the_report(
    folder: Path,
    tmp_path: Path,
    driver: _C.FakeDriver,
    accelerator: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The row of the tier has less by as much; tokens are those of all in the tier."""
    file = tmp_path / "report.json"
    session = Session.simulated(load_machine(MACHINE), driver=driver)
    monkeypatch.setattr(fit, "session_on", lambda *_: session)
    places = ("--place", "weights=cxl", "--place", "kv=ldram", "--accelerator", accelerator)
    asked = ("--gen-len", "20", "--json", str(file))
    assert run(command(folder, *places, *asked)) == 0
    whole = json.loads(file.read_text())
    capsys.readouterr()
    assert run(command(folder, *places, *asked, "--accelerator-kv", "0.25")) == 0
    report, said = json.loads(file.read_text()), " ".join(capsys.readouterr().out.split())
    assert report["tokens"] == whole["tokens"]

    def kv_of(report: Any) -> dict[str, int]:
        rows = [row for row in report["placement"] if row["kind"] == "kv"]
        return {row["part"]: row["requested_bytes"] for row in rows}

    parts, all_bytes = kv_of(report), kv_of(whole)["host"]
    assert parts["host"] + parts["accelerator"] == all_bytes
    assert parts["accelerator"] == pytest.approx(all_bytes / 4, rel=0.1)
    assert "0.25 on cpu" in said  # what stands for it here
    joined = report["attention"]["joined"]
    assert joined > 0
    assert f"Of those in place {joined} joined a part on the accelerator" in said


def test_answers_and_report_are_not_lost_to_a_trace_that_cannot_be_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    more = ("--place", "kv=cxl", "--gen-len", "2", "--trace", "/dev/full", "--output", str(file))
    assert run(command(folder, *more)) == 2
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == ("cxl-offload: error: /dev/full: No space left on device")
    assert "Answers" in said.out
    assert "Where the bytes are" in said.out
    assert json.loads(file.read_text())["gen_len"] == 2


def test_sigterm_while_it_generates_gives_everything_back_in_one_line(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[Session] = []
    made = fit.session_on
    monkeypatch.setattr(fit, "session_on", lambda *a: (sessions.append(made(*a)), sessions[0])[1])

    class Ended(TokenClock):
        def __call__(self, ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
            if len(self.times) == 3:
                assert sessions[0].stats().asked_bytes.current > 0
                os.kill(os.getpid(), signal.SIGTERM)
            return super().__call__(ids, scores, **more)

    monkeypatch.setattr(generation, "TokenClock", Ended)
    before = set(os.listdir("/dev/shm"))
    places = ("--place", "weights=cxl", "--place", "kv=cxl", "--gen-len", "6")
    assert run(command(folder, *places)) == 143
    assert capsys.readouterr().err.splitlines()[-1] == "cxl-offload: ended by SIGTERM"
    gc.collect()
    assert sessions[0].stats().asked_bytes.current == 0
    assert set(os.listdir("/dev/shm")) <= before
    kept = ("--persist", name, "--persist-bytes", "1MiB")
    assert run(command(folder, *places, *kept)) == 143
    assert set(os.listdir("/dev/shm")) - before == {kept_path(name).name}
    with monkeypatch.context() as whole:
        whole.setattr(generation, "TokenClock", TokenClock)
        assert run(command(folder, *places, *kept)) == 0
