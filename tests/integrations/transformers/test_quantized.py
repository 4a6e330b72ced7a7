"""Quantized checkpoints, as transformers runs them on a CPU: codes and scales in tiers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, QuantoConfig, TorchAoConfig
from transformers.integrations.bitnet import pack_weights

from cxl_offload.integrations.transformers import load, offload
from cxl_offload.integrations.transformers.weights import meta_model, weight_bytes
from cxl_offload.memory import Session
from cxl_offload.ops.view import held_tensors

from .models import generate, make

POLICIES = {"kv": "bind:2", "weights": "bind:1"}
BLOCK = 32


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """BitNet's layers ask torch to compile them, which takes longer than the test."""
    with torch.compiler.set_stance("force_eager"):
        yield


def bitnet(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Four ternary weights a byte, and one scale."""
    scale = 1 / weight.abs().mean()
    codes = (weight * scale).round().clamp(-1, 1)
    return {"weight": pack_weights(codes), "weight_scale": scale.reshape(1)}


def fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A scale for each block."""
    rows, columns = (size // BLOCK for size in weight.shape)
    blocks = weight.reshape(rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return {"weight": codes.reshape(weight.shape), "weight_scale_inv": scales}


BY_HAND: dict[str, tuple[Callable[[torch.Tensor], dict[str, torch.Tensor]], dict[str, Any]]] = {
    "bitnet": (bitnet, {"quant_method": "bitnet", "linear_class": "bitlinear"}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}),
}


def save_quantized(kind: str, folder: Path) -> None:
    """A checkpoint of a tiny LLaMA whose projections are quantized."""
    make("llama").save_pretrained(folder)
    if kind == "torchao":
        pytest.importorskip("torchao", reason="torchao is not installed")
        from torchao.quantization import Int8WeightOnlyConfig

        asked = TorchAoConfig(Int8WeightOnlyConfig())
        made = AutoModelForCausalLM.from_pretrained(folder, quantization_config=asked)
        made.save_pretrained(folder)
        return
    quantize, config = BY_HAND[kind]
    weights: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith("proj.weight"):
            prefix = name.removesuffix("weight")
            weights |= {prefix + key: each for key, each in quantize(weight).items()}
        else:
            weights[name] = weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**text, "quantization_config": config}))


def nodes_of_projection(model: Any, session: Session) -> set[int]:
    """Where codes and scales of one layer's weight are; -1: in no tier."""
    layer = model.model.layers[0].mlp.down_proj
    tensors = [layer.weight]
    tensors += [layer.weight_scale] if hasattr(layer, "weight_scale") else []
    found: set[int] = set()
    for held in (held for tensor in tensors for held in held_tensors(tensor)):
        found |= set(session.bytes_per_node(held.data_ptr(), held.nbytes))
    return found


@pytest.mark.parametrize("kind", ["bitnet", "fp8", "torchao"])
def test_quantized_checkpoint_gives_the_same_tokens_from_its_tier(
    kind: str, session: Session, tmp_path: Path
) -> None:
    save_quantized(kind, tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    expected = generate(stock)
    assert not torch.equal(expected, generate(make("llama")))
    with offload(stock, POLICIES, session=session) as done:
        assert nodes_of_projection(stock, session) == {1}
        assert torch.equal(generate(stock), expected)
        assert done.calls.kernel > 0
        moved = {kind: use.peak_bytes for (kind, _), use in done.store.use().items()}
    assert nodes_of_projection(stock, session) != {1}
    assert torch.equal(generate(stock), expected)
    model = load(tmp_path, POLICIES, session=session)
    assert nodes_of_projection(model, session) == {1}
    assert session.stats().asked_bytes.current == sum(moved.values()) - moved["kv"]
    with offload(model, POLICIES, session=session):
        assert torch.equal(generate(model), expected)
    assert weight_bytes(meta_model(tmp_path)) == {}


def test_weights_that_quanto_quantizes_while_it_loads_are_moved(
    session: Session, tmp_path: Path
) -> None:
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    make("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=QuantoConfig(weights="int8")
    ).eval()
    expected = generate(model)
    with offload(model, POLICIES, session=session):
        assert nodes_of_projection(model, session) == {1}
        assert torch.equal(generate(model), expected)
    assert torch.equal(generate(model), expected)
