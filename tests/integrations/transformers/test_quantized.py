"""Quantized checkpoints, as transformers runs them on a CPU: codes and scales in tiers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, QuantoConfig, TorchAoConfig

from benchmarks.llama_cpp_peer import write_gguf
from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import load, offload
from cxl_offload.integrations.transformers.weights import meta_model, weight_bytes
from cxl_offload.memory import Session
from cxl_offload.tensor_bytes import held_tensors

from .ecosystem import needed
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
    # It imports torch's compiler, which takes every process that collects tests two seconds.
    from transformers.integrations.bitnet import pack_weights

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


def fp8_by_row(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A scale for each row."""
    scales = weight.abs().amax(1, keepdim=True) / 448
    return {"weight": (weight / scales).to(torch.float8_e4m3fn), "weight_scale": scales}


def four_bits(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Eight numbers a word, the first in its lowest bits, and a scale for each group."""
    rows, columns = weight.shape
    groups = weight.reshape(rows, -1, BLOCK)
    scales = groups.abs().amax(2) / 7
    codes = (groups / scales[:, :, None]).round().clamp(-8, 7).reshape(rows, -1, 8).long() + 8
    words = (codes << (4 * torch.arange(8))).sum(2)
    return {
        "weight_packed": words.where(words < 1 << 31, words - (1 << 32)).int(),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns]),
    }


def compressed(kind: str, bits: int, strategy: dict[str, Any], form: str) -> dict[str, Any]:
    """What compressed-tensors writes into a configuration."""
    numbers = {"num_bits": bits, "type": kind, "symmetric": True}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": {**numbers, **strategy}}
    if bits == 8:
        group["input_activations"] = {**numbers, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


BY_HAND: dict[str, tuple[Callable[[torch.Tensor], dict[str, torch.Tensor]], dict[str, Any]]] = {
    "bitnet": (bitnet, {"quant_method": "bitnet", "linear_class": "bitlinear"}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}),
    "compressed-fp8": (
        fp8_by_row,
        compressed("float", 8, {"strategy": "channel"}, "float-quantized"),
    ),
    "compressed-int4": (
        four_bits,
        compressed("int", 4, {"strategy": "group", "group_size": BLOCK}, "pack-quantized"),
    ),
}


def save_quantized(kind: str, folder: Path) -> None:
    """A checkpoint of a tiny LLaMA whose projections are quantized."""
    make("llama").save_pretrained(folder)
    if kind == "torchao":
        needed("torchao")
        from torchao.quantization import Int8WeightOnlyConfig

        asked = TorchAoConfig(Int8WeightOnlyConfig())
        made = AutoModelForCausalLM.from_pretrained(folder, quantization_config=asked)
        made.save_pretrained(folder)
        return
    if kind.startswith("compressed"):
        needed("compressed_tensors")
    quantize_files(kind, folder)


def quantize_files(kind: str, folder: Path) -> None:
    """Quantize the projections of a checkpoint that is there."""
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [*BY_HAND, "torchao"])
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
    assert nodes_of_projection(model, session) == {1}, "where generating left it"
    assert weight_bytes(meta_model(tmp_path)) == {}
    least = weight_bytes(meta_model(tmp_path), folder=tmp_path)
    for kind in ("mlp", "attention", "norm", "embedding", "head"):
        assert 0 < least[kind] <= moved[kind], kind


def test_weights_that_quanto_quantizes_while_it_loads_are_moved(
    session: Session, tmp_path: Path
) -> None:
    needed("optimum.quanto")
    make("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=QuantoConfig(weights="int8")
    ).eval()
    expected = generate(model)
    with offload(model, POLICIES, session=session):
        assert nodes_of_projection(model, session) == {1}
        assert torch.equal(generate(model), expected)
    assert torch.equal(generate(model), expected)


def test_weights_that_would_be_decompressed_elsewhere_are_refused(
    session: Session, tmp_path: Path
) -> None:
    save_quantized("compressed-int4", tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with (
        pytest.raises(ConfigError, match=r"dequantize=True"),
        offload(stock, POLICIES, session=session),
    ):
        pytest.fail("the block began")
    with offload(stock, {"kv": "bind:2"}, session=session):
        in_block = generate(stock)
    assert torch.equal(generate(stock), in_block)


@pytest.mark.parametrize("kind", ["bf16", "q8_0", "q4_0"])
def test_gguf_file_gives_the_same_tokens_as_stock(
    kind: str, session: Session, tmp_path: Path
) -> None:
    needed("gguf")
    model = make("llama")
    path = tmp_path / f"model-{kind}.gguf"
    write_gguf(model, path, kind)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name).eval()
    stock.generation_config = model.generation_config
    expected = generate(stock)
    made = load(path, POLICIES, session=session)
    made.generation_config = model.generation_config
    assert nodes_of_projection(made, session) == {1}
    total = sum(weight.nbytes for weight in made.parameters())
    assert session.stats().asked_bytes.current >= total
    assert sum(weight_bytes(meta_model(path)).values()) == total
    with offload(made, {"kv": "bind:2"}, session=session) as done:
        assert torch.equal(generate(made), expected)
        assert done.calls.kernel > 0
    assert not torch.equal(made.lm_head.weight, model.lm_head.weight), "it was quantized"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "gptq in 8 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 16}, "groups of 16"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "another order"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "format marlin"),
        ({"quant_method": "gptq", "bits": 4}, "no weights in safetensors files"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version gemv"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "no zeros"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "runes"}, "runes.* it knows .*torchao"),
        ({"bits": 4}, "quantized by None"),
    ],
)
def test_checkpoint_that_transformers_cannot_load_is_refused_before_its_weights_are_read(
    asked: dict[str, Any], reason: str, session: Session, tmp_path: Path
) -> None:
    if asked.get("quant_method") == "bitsandbytes" and find_spec("bitsandbytes"):
        pytest.skip("bitsandbytes is installed")
    make("llama").config.save_pretrained(tmp_path)  # there are no weights
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**text, "quantization_config": asked}))
    with pytest.raises(ConfigError, match=reason) as caught:
        load(tmp_path, POLICIES, session=session)
    assert "\n" not in str(caught.value)


def test_file_that_is_no_gguf_is_refused(session: Session, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(ConfigError, match="or a GGUF file"):
        load(path, POLICIES, session=session)
    for content in (b"", b"GGUF", b"something else"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"model\.gguf: "):
            load(path, POLICIES, session=session)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_experts_stacked_in_their_place_are_those_of_transformers(
    family: str, dtype: torch.dtype, session: Session, tmp_path: Path
) -> None:
    make(family).save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    for policies in ({"experts": "bind:1"}, {"experts": "bind:1", "experts:1,3": "bind:2"}):
        model = load(tmp_path, policies, dtype=dtype, session=session)
        for name, weight in stock.named_parameters():
            assert torch.equal(weight, model.get_parameter(name)), name
        held = sum(w.nbytes for name, w in model.named_parameters() if ".experts." in name)
        assert session.stats().asked_bytes.current == held
        del model
