"""Checkpoints that lack a tensor, or have one of another shape: refused, and never made up."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from benchmarks.llama_cpp_peer import write_gguf
from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import load
from cxl_offload.memory import Session
from tests.integrations.transformers.models import make

POLICIES = {"weights": "bind:2"}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make("llama")


def saved(model: PreTrainedModel, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    model.save_pretrained(folder)
    return folder / "model.safetensors", load_file(folder / "model.safetensors")


def test_every_tensor_that_is_missing_is_named(
    model: PreTrainedModel, session: Session, tmp_path: Path
) -> None:
    file, tensors = saved(model, tmp_path)
    load(tmp_path, POLICIES, session=session)  # the control: whole
    for name in tensors:
        rest = {key: tensor for key, tensor in tensors.items() if key != name}
        save_file(rest, file, metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=f"the files have no {name}, which would be random"):
            load(tmp_path, POLICIES, session=session)


def test_shapes_that_differ_are_named_however_little_transformers_logs(
    model: PreTrainedModel, session: Session, tmp_path: Path
) -> None:
    file, tensors = saved(model, tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    save_file({**tensors, name: tensors[name].t().contiguous()}, file, metadata={"format": "pt"})
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with pytest.raises(ConfigError, match=r"not those that config.json describes: .*down_proj"):
            load(tmp_path, POLICIES, session=session)
        assert transformers_logging.get_verbosity() == transformers_logging.ERROR
    finally:
        transformers_logging.set_verbosity(before)


@pytest.mark.parametrize("index", ["[1, 2]", "3", '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_index_that_is_none_is_refused(
    index: str, model: PreTrainedModel, session: Session, tmp_path: Path
) -> None:
    file, _ = saved(model, tmp_path)
    file.rename(tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load(tmp_path, POLICIES, session=session)


def test_gguf_file_with_other_tensors_than_the_model_is_refused(
    model: PreTrainedModel, session: Session, tmp_path: Path
) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    file = tmp_path / "model.gguf"
    write_gguf(model, file, "q8_0")
    whole = file.read_bytes()
    name = b"blk.0.ffn_down.weight"
    begin = whole.index(name)
    width = begin + len(name) + 4  # behind the number of dimensions
    load(file, POLICIES, session=session)  # the control

    def damaged(at: int, bytes_there: bytes) -> None:
        made = bytearray(whole)
        made[at : at + len(bytes_there)] = bytes_there
        file.write_bytes(made)

    for at, there, said in (
        (begin, b"blk.7", r"the files have no model\.layers\.0\.mlp\.down_proj\.weight, "),
        (8, struct.pack("<Q", 0), r"the files have no lm_head\.weight and 20 more"),
        (width, struct.pack("<Q", 64), r"down_proj\.weight is \(64, 64\) there, and \(64, 96\)"),
        (width, struct.pack("<Q", 0), r"blk\.0\.ffn_down\.weight: "),
    ):
        damaged(at, there)
        with pytest.raises(ConfigError, match=said):
            load(file, POLICIES, session=session)
