"""``cxl-offload generate`` from the folder to the report, and what it refuses before it loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig, PreTrainedTokenizerFast

from cxl_offload.cli.main import main

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
