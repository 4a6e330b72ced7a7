"""Configurations of checkpoints that cannot be: one line with the file and the key, at once."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import load
from cxl_offload.integrations.transformers.config_checks import MOST_LAYERS

from .commands import command, run
from .models import make

LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7 + [0.0]}
ABOVE_0 = "must be finite and above 0, not"
YARN = {"rope_type": "yarn", "rope_theta": 1e4}


def changed(folder: Path, at: Path, **config: Any) -> Path:
    """A copy of a checkpoint whose configuration says something else."""
    shutil.copytree(folder, at)
    said = json.loads((at / "config.json").read_text())
    (at / "config.json").write_text(json.dumps({**said, **config}))
    return at


@pytest.fixture(scope="module")
def experts(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of experts with the words and the prompts of ``folder``."""
    made = tmp_path_factory.mktemp("experts")
    make("qwen3-moe").save_pretrained(made)
    PreTrainedTokenizerFast.from_pretrained(folder).save_pretrained(made)
    shutil.copy(folder / "prompts.txt", made)
    return made


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is built, were it without weights, fails the test."""
    monkeypatch.setattr(
        "transformers.AutoModelForCausalLM.from_config", lambda *_, **__: pytest.fail("was built")
    )


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """What transformers warns of, which it writes past what pytest captures."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


def the_line(model: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says of a model that it refuses."""
    capsys.readouterr()
    assert run(command(model, "--place", "kv=cxl", "--gen-len", "2")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    start = f"cxl-offload: error: {model / 'config.json'}: "
    assert line.startswith(start)
    return line.removeprefix(start)


@pytest.mark.usefixtures("nothing_built")
@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_hidden_layers", -1, "must be at least 1, not -1"),
        ("num_hidden_layers", 0, "must be at least 1, not 0"),
        ("num_hidden_layers", 10**9, f"must be at most {MOST_LAYERS}, not 1000000000"),
        ("num_attention_heads", 0, "must be at least 1, not 0"),
        ("hidden_size", 0, "must be at least 1, not 0"),
        ("num_key_value_heads", 0, "must be at least 1, not 0"),
        ("num_key_value_heads", 3, "4 heads of attention are no multiple of 3"),
        ("head_dim", 0, "must be at least 1, not 0"),
        ("head_dim", -4, "must be at least 1, not -4"),
        ("vocab_size", 0, "must be at least 1, not 0"),
        ("max_position_embeddings", -1, "must be at least 1, not -1"),
        ("dtype", "float3", "'float3' is none that transformers knows"),
    ],
)
def test_number_that_no_model_has_is_refused_before_anything_is_built(
    key: str,
    value: object,
    said: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = changed(folder, tmp_path / "model", **{key: value})
    assert the_line(model, capsys) == f"{key}: {said}"


@pytest.mark.usefixtures("nothing_built")
def test_widths_that_heads_do_not_divide_are_refused_before_anything_is_built(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = changed(folder, tmp_path / "model", hidden_size=63)
    assert "(63) is not a multiple of the number of attention heads" in the_line(model, capsys)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"rope_parameters": {"rope_type": "banana"}}, "rope_parameters.rope_type: 'banana' is"),
        ({"rope_scaling": {"type": "banana"}}, "rope_scaling.type: 'banana' is none"),
        ({"hidden_act": "mish-mash"}, "hidden_act: 'mish-mash' is none that transformers knows"),
        ({"rope_parameters": YARN}, "Missing required keys in `rope_parameters`"),
    ],
)
def test_name_that_transformers_does_not_know_is_named_with_its_key(
    config: dict[str, Any],
    said: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    warned: list[str],
) -> None:
    line = the_line(changed(folder, tmp_path / "model", **config), capsys)
    assert line.startswith(said)
    assert not warned  # the error says it


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: must be at least 1 and at most the 4"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok: must be at least 1 and at most the 4"),
        ({"num_local_experts": -1}, "num_local_experts: must be at least 0, not -1"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window: must be at least 1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step: must be at least 1, not 0"),
    ],
)
def test_experts_and_windows_that_cannot_be_are_refused(
    config: dict[str, Any],
    said: str,
    experts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = the_line(changed(experts, tmp_path / "model", **config), capsys)
    assert line.startswith(said)


@pytest.mark.usefixtures("nothing_built")
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"rope_theta": 0}, f"rope_theta: {ABOVE_0} 0"),
        ({"rope_theta": -1e4}, f"rope_theta: {ABOVE_0} -10000.0"),
        ({"rope_theta": float("nan")}, f"rope_theta: {ABOVE_0} nan"),
        ({"rope_theta": float("inf")}, f"rope_theta: {ABOVE_0} inf"),
        ({"rope_local_base_freq": 0.0}, f"rope_local_base_freq: {ABOVE_0} 0.0"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
            f"rope_parameters.rope_theta: {ABOVE_0} 0",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 0}}},
            f"rope_parameters.sliding_attention.rope_theta: {ABOVE_0} 0",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, f"rope_scaling.factor: {ABOVE_0} 0"),
        (
            {"rope_parameters": {**YARN, "factor": 0.0}},
            f"rope_parameters.factor: {ABOVE_0} 0.0",
        ),
        ({"rope_parameters": LONG}, f"rope_parameters.long_factor: {ABOVE_0} 0.0"),
    ],
)
def test_positions_that_would_be_turned_by_nonsense_are_refused(
    config: dict[str, Any],
    said: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = changed(folder, tmp_path / "model", **config)
    assert the_line(model, capsys) == said


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5, "rope_parameters": None},
        {"rope_theta": None, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.5}},
    ],
)
def test_positions_that_a_model_may_have_are_taken(
    config: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    model = changed(folder, tmp_path / "model", **config)
    assert run(command(model, "--place", "kv=cxl", "--gen-len", "2")) == 0


def described_by_gguf(file: Path, **said: Any) -> Path:
    """A file of GGUF with the numbers of a model, and no weights of it."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    numbers = {
        "block_count": 2,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "context_length": 512,
        "vocab_size": 300,
        "rope.freq_base": 1e4,
    }
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in {**numbers, **said}.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"llama.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


@pytest.mark.usefixtures("nothing_built")
@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("block_count", 0, "num_hidden_layers: must be at least 1, not 0"),
        ("block_count", 10**9, f"num_hidden_layers: must be at most {MOST_LAYERS}, not 1000000000"),
        ("embedding_length", 0, "hidden_size: must be at least 1, not 0"),
        ("feed_forward_length", 0, "intermediate_size: must be at least 1, not 0"),
        ("attention.head_count", 0, "num_attention_heads: must be at least 1, not 0"),
        ("attention.head_count_kv", 0, "num_key_value_heads: must be at least 1, not 0"),
        ("attention.head_count_kv", 3, "4 heads of attention are no multiple of 3"),
        ("context_length", 0, "max_position_embeddings: must be at least 1, not 0"),
        ("vocab_size", 0, "vocab_size: must be at least 1, not 0"),
        ("rope.freq_base", math.nan, f"rope_theta: {ABOVE_0} nan"),
        ("rope.freq_base", 0.0, f"rope_theta: {ABOVE_0} 0.0"),
        ("rope.freq_base", -1e4, f"rope_theta: {ABOVE_0} -10000.0"),
    ],
)
def test_number_of_a_gguf_file_that_no_model_has_is_refused_before_anything_is_built(
    key: str, value: float, said: str, tmp_path: Path
) -> None:
    file = described_by_gguf(tmp_path / "model.gguf", **{key: value})
    with pytest.raises(ConfigError) as refused:
        load(file, {"weights": "bind:0"})
    assert str(refused.value).startswith(f"{file}: ")
    assert said in str(refused.value)


@pytest.mark.usefixtures("nothing_built")
@pytest.mark.parametrize("kept", [0, 3, 4, 20, 60, -1])
def test_gguf_file_that_is_cut_off_is_refused(kept: int, tmp_path: Path) -> None:
    file = described_by_gguf(tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ConfigError, match=re.escape(f"{file}: ")):
        load(file, {"weights": "bind:0"})


def test_configuration_of_a_part_is_named_with_the_part(folder: Path, tmp_path: Path) -> None:
    model = changed(folder, tmp_path / "model", text_config={"num_hidden_layers": -1})
    with pytest.raises(ConfigError, match=r"config\.json: text_config\.num_hidden_layers: must be"):
        load(model, {"weights": "first-touch"})


def test_what_transformers_warns_of_is_told_where_nothing_is_wrong(
    folder: Path, tmp_path: Path, warned: list[str]
) -> None:
    model = changed(folder, tmp_path / "model", bos_token_id=999)
    assert run(command(model, "--place", "kv=cxl", "--gen-len", "2")) == 0
    assert [said for said in warned if "bos_token_id must be" in said]
