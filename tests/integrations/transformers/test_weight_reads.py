"""Weights are read from their file, and not through the mapping, where memory still is the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import cxl_offload
from cxl_offload.integrations.transformers import load, offload, weight_reads
from cxl_offload.transfer.file_reads import FilePart, FileReads


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1100,
        hidden_size=256,
        intermediate_size=1100,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[FilePart]:
    """Every part of a file that was read."""
    found: list[FilePart] = []

    start = FileReads.start

    def counted(reads: FileReads, part: FilePart, **others: Any) -> None:
        found.append(part)
        start(reads, part, **others)

    monkeypatch.setattr(FileReads, "start", counted)
    return found


def large_bytes(model: PreTrainedModel) -> int:
    sizes = [weight.nbytes for weight in model.parameters()]
    return sum(nbytes for nbytes in sizes if nbytes >= weight_reads.LEAST_BYTES)


def same_weights(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_large_weights_of_a_checkpoint_are_read_from_its_file(
    folder: Path, parts: list[FilePart]
) -> None:
    stock = AutoModelForCausalLM.from_pretrained(folder)
    model = load(folder, {"weights": "bind:0"})
    assert same_weights(model, stock)
    assert sum(part.nbytes for part in parts) == large_bytes(stock) > 8 << 20
    assert {part.path for part in parts} == {str(folder / "model.safetensors")}


def test_weights_in_another_dtype_than_the_file_are_copied(
    folder: Path, parts: list[FilePart]
) -> None:
    model = load(folder, {"weights": "bind:0"}, dtype=torch.bfloat16)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert same_weights(model, stock)
    assert not parts


def test_weight_that_was_trained_since_is_moved_as_it_is(
    folder: Path, parts: list[FilePart]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    changed = model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        changed[7, 3] += 1
    before = [weight.clone() for weight in model.parameters()]
    with offload(model, {"weights": "bind:0"}):
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert sum(part.nbytes for part in parts) < large_bytes(model)


@pytest.mark.parametrize("what", ["view", "turned", "stripes"])
def test_part_of_a_mapped_weight_has_the_elements_of_the_part(
    tmp_path: Path, what: str, parts: list[FilePart]
) -> None:
    save_file({"a": torch.arange(3 << 19, dtype=torch.float32).view(512, -1)}, tmp_path / "f")
    with safe_open(tmp_path / "f", framework="pt") as file:
        whole = file.get_tensor("a")
    part = {"view": whole[100:], "turned": whole.T, "stripes": whole[::2]}[what]
    placed = cxl_offload.empty(*part.shape, dtype=part.dtype)
    with weight_reads.reads_of_weights() as reads:
        weight_reads.start_filling(reads, placed, part)
        reads.wait()
    assert torch.equal(placed, part)
    assert len(parts) == (what == "view")
