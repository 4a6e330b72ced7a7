"""OPT checkpoints made from a seed, for demonstrations and tests without a download."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from cxl_offload.errors import ConfigError

_ATTENTION_SPREAD = 2.0
"""Standard deviation of an attention weight times the square root of its inputs.

Chosen by running, not by theory: with the usual 0.02 attention averages over all tokens, and losing
the KV cache hardly changes the answer; with this it picks some tokens over others.
"""
_MLP_SPREAD = 1.0
_BIAS_SPREAD = 0.05
_EMBEDDING_SPREAD = 0.12


@dataclass(frozen=True, slots=True, kw_only=True)
class OptShape:
    """Sizes of an OPT model; the MLP is four times as wide, as in every OPT.

    Parameters
    ----------
    layers, hidden, heads
        Depth, width, and attention heads that divide the width.
    vocab
        Tokens; 272 hold the byte-level tokenizer.
    positions
        Longest prompt and answer together.
    activation
        ``relu`` (OPT) or ``gelu`` (Galactica).
    """

    layers: int
    hidden: int
    heads: int
    vocab: int = 272
    positions: int = 2048
    activation: str = "relu"

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every parameter, as Hugging Face stores them."""
        shapes = opt_weight_shapes(
            layers=self.layers, hidden=self.hidden, vocab=self.vocab, positions=self.positions
        )
        final = "model.decoder.final_layer_norm"
        return {
            f"model.{name}".replace("model.decoder.layer_norm", final): shape
            for name, shape in shapes.items()
        }

    @property
    def parameters(self) -> int:
        """Parameters, the shared embedding counted once."""
        return sum(int(torch.Size(shape).numel()) for shape in self.tensors().values())


def opt_weight_shapes(
    *, layers: int, hidden: int, vocab: int, positions: int
) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight, as FlexGen's files have them."""
    h, ffn = hidden, 4 * hidden
    shapes: dict[str, tuple[int, ...]] = {
        "decoder.embed_tokens.weight": (vocab, h),
        "decoder.embed_positions.weight": (positions + 2, h),
        "decoder.layer_norm.weight": (h,),
        "decoder.layer_norm.bias": (h,),
    }
    for at in range(layers):
        layer = f"decoder.layers.{at}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes[f"{layer}self_attn.{name}.weight"] = (h, h)
            shapes[f"{layer}self_attn.{name}.bias"] = (h,)
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            shapes[f"{layer}{name}.weight"] = (h,)
            shapes[f"{layer}{name}.bias"] = (h,)
        shapes[layer + "fc1.weight"] = (ffn, h)
        shapes[layer + "fc1.bias"] = (ffn,)
        shapes[layer + "fc2.weight"] = (h, ffn)
        shapes[layer + "fc2.bias"] = (h,)
    return shapes


DEMO_SHAPE = OptShape(layers=16, hidden=768, heads=12)
"""The width of OPT-125M, byte-level tokens, and layers enough for more than 100 M parameters."""


def make_opt(path: Path | str, shape: OptShape, *, seed: int = 0) -> Path:
    """Write a half-precision OPT checkpoint whose tokens depend on its KV cache.

    Parameters
    ----------
    path
        Folder to make; it appears complete or not at all.
    shape
        Sizes of the model.
    seed
        The same seed and shape give the same weights.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    FileExistsError
        ``path`` exists.
    ConfigError
        The sizes do not fit together.
    """
    folder = Path(path)
    if shape.hidden % shape.heads != 0:
        raise ConfigError(f"hidden {shape.hidden} is no multiple of {shape.heads} heads")
    if folder.exists():
        raise FileExistsError(f"{folder} exists; remove it or give another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        save_file(_weights(shape, seed), str(unfinished / "model.safetensors"), {"format": "pt"})
        config = json.dumps(_config(shape), indent=2)
        (unfinished / "config.json").write_text(config + "\n", encoding="utf-8")
        os.rename(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _weights(shape: OptShape, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, size in shape.tensors().items():
        values = torch.randn(size, generator=generator)
        if name.endswith("bias"):
            values *= _BIAS_SPREAD
        elif "embed" in name:
            values *= _EMBEDDING_SPREAD
        elif "layer_norm" in name:
            values = torch.ones(size)
        elif "self_attn" in name:
            values *= _ATTENTION_SPREAD / size[1] ** 0.5
        else:
            values *= _MLP_SPREAD / size[1] ** 0.5
        if name.endswith("fc2.weight"):
            # What comes out of a ReLU has a mean; it would drown what distinguishes the tokens.
            values -= values.mean(dim=1, keepdim=True)
        weights[name] = values.half()
    return weights


def _config(shape: OptShape) -> dict[str, object]:
    return {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "activation_function": shape.activation,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "word_embed_proj_dim": shape.hidden,
        "ffn_dim": 4 * shape.hidden,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.positions,
        "vocab_size": shape.vocab,
        "do_layer_norm_before": True,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "pad_token_id": 1,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "torch_dtype": "float16",
    }
