"""What ``cxl-offload generate`` refuses, in one line and, where it can, before it loads a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BloomConfig

from cxl_offload import _C
from cxl_offload.cli.main import main
from cxl_offload.integrations.transformers import generation, load
from cxl_offload.integrations.transformers import loading as loading_module

from .commands import command, run
from .fake_accelerator import FakeCopies, fake_accelerator
from .models import VOCAB


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--place", "kvs=cxl"), "kind 'kvs'"),
        (("--place", "kv=attic"), "'attic' is neither a node id nor a tier"),
        (("--place", "kv"), "expected KIND=POLICY"),
        (("--place", ""), "expected KIND=POLICY"),
        (("--plan", ""), "--plan '': the name of the file is empty"),
        (("--place", "kv=cxl", "--tokenizer", ""), "--tokenizer '': the name of the file is empty"),
        (("--place", "kv=cxl", "--place", "kv=ldram"), "kv is given twice"),
        ((), "--place: name at least one kind"),
        (("--place", "kv=cxl", "--gen-len", "600"), "512 positions"),
        (("--place", "kv=cxl", "--prompts", "nowhere.txt"), "nowhere.txt"),
        (("--place", "kv=cxl", "--model", "nowhere"), "nowhere"),
        (("--place", "kv=cxl", "--attention", "flash"), "flash"),
        (("--place", "kv=cxl", "--dtype", "float3"), "float3"),
        (("--place", "kv=cxl", "--kv-dtype", "int3"), "kv_dtype int3"),
        (("--place", "kv=cxl", "--kv-dtype", ""), "kv_dtype '': it is"),
        (("--place", "kv=bind:cxl", "--whole-sequences"), "--whole-sequences: kv="),
        (("--place", "mlp=cxl", "--whole-sequences"), "--whole-sequences: kv has no policy"),
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


def test_accelerator_without_room_is_refused_before_the_model_loads(
    folder: Path,
    driver: _C.FakeDriver,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_accelerator(monkeypatch, lambda session: FakeCopies(session, driver), free=1000)
    monkeypatch.setattr(generation, "load", None)  # would be called
    assert run(command(folder, "--place", "weights=cxl", "--accelerator", "cuda")) == 2
    assert "which has 1000 B left" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--place", "kv=ldram"], "accelerator_kv 0.5: no accelerator computes"),
        (["--accelerator", "cuda"], "accelerator_kv 0.5 is a share of a cache in a tier"),
    ],
)
def test_share_of_the_cache_that_cannot_be_is_refused_before_the_model_loads(
    options: list[str],
    said: str,
    folder: Path,
    accelerator: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation, "load", None)  # would be called
    places = ("--place", "weights=cxl", "--accelerator-kv", "0.5", *options)
    assert run(command(folder, *places)) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_keys_and_values_count_in_the_room_of_the_accelerator(
    folder: Path,
    driver: _C.FakeDriver,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A share that is too large is refused where none at all would fit."""
    free = 600 << 10
    fake_accelerator(monkeypatch, lambda session: FakeCopies(session, driver), free=free)
    monkeypatch.setattr(generation, "load", None)  # would be called
    places = ("--place", "weights=cxl", "--place", "kv=ldram", "--accelerator", "cuda")
    asked = ("--gen-len", "400")
    with pytest.raises(TypeError):  # the control: all was checked, and the model would be loaded
        main(command(folder, *places, *asked))
    capsys.readouterr()
    assert run(command(folder, *places, *asked, "--accelerator-kv", "1")) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "of keys and values needs 646 KiB on cpu" in said
    assert (
        "which has 600 KiB left; give a smaller share of keys and values (accelerator_kv)" in said
    )


@pytest.mark.timeout(600)
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
        ("vocab_size", -5),
        ("num_attention_heads", 0),
        ("dtype", "foo"),
        ("num_hidden_layers", "x"),
    ],
)
def test_configuration_that_is_wrong_is_one_line(
    field: str, value: object, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(damaged(folder, tmp_path / "model", **{field: value}), capsys)
    if field in ("hidden_size", "vocab_size") and value != -5:
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
    monkeypatch.setattr(loading_module, "kind_of_weight", lambda *_: {}["a fault of ours"])
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


@pytest.mark.parametrize("divided", ["rows", "tensors"])
def test_ranks_without_torchrun_are_refused_and_one_rank_of_it_is_taken(
    divided: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = command(folder, "--place", "kv=cxl", "--gen-len", "2", "--ranks", divided)
    with monkeypatch.context() as alone:
        alone.setattr(generation, "load", lambda *_, **__: pytest.fail("weights were loaded"))
        assert run(asked) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"--ranks {divided}: there are no ranks to divide it" in line
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")  # as `torchrun --nproc_per_node 1` does
    assert run(asked) == 0
