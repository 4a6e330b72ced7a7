"""gpt-oss as it is published: experts in mxfp4, which transformers makes numbers of on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cxl_offload.integrations.transformers import load, offload
from cxl_offload.memory import Session

from .models import generate, make

POLICIES = {"kv": "bind:2", "experts": "bind:1", "weights": "bind:0"}
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the lower three bits of a code are worth; the fourth is the sign."""


def blocks(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random codes and exponents of ``(experts, rows, columns)``, and what they are worth."""
    random = np.random.default_rng(seed)
    experts, rows, columns = shape
    codes = random.integers(0, 16, (experts, rows, columns // 32, 32), dtype=np.uint8)
    exponents = random.integers(122, 126, (experts, rows, columns // 32), dtype=np.uint8)
    signs = np.where(codes & 8, -1.0, 1.0)
    worth = signs * np.array(VALUES)[codes & 7] * 2.0 ** (exponents.astype(int) - 127)[..., None]
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    numbers = torch.from_numpy(worth.reshape(shape)).transpose(1, 2).contiguous()
    return torch.from_numpy(packed), torch.from_numpy(exponents), numbers


@pytest.fixture
def published(tmp_path: Path) -> dict[str, torch.Tensor]:
    """A checkpoint in ``tmp_path``; what its experts' weights are worth."""
    make("gpt-oss", torch.bfloat16).save_pretrained(tmp_path)
    kept, worth = load_file(tmp_path / "model.safetensors"), {}
    for at, name in enumerate(sorted(name for name in kept if name.endswith("_proj"))):
        experts, width, outputs = kept.pop(name).shape
        packed, exponents, worth[name] = blocks((experts, outputs, width), at)
        kept |= {f"{name}_blocks": packed, f"{name}_scales": exponents}
    assert len(worth) == 4
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((tmp_path / "config.json").read_text())
    said["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(said))
    return worth


def test_experts_are_numbers_in_their_tier_with_the_tokens_of_stock(
    published: dict[str, torch.Tensor], tmp_path: Path, session: Session
) -> None:
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    stock.generation_config = make("gpt-oss").generation_config
    expected = generate(stock)
    assert not torch.equal(expected, generate(make("gpt-oss", torch.bfloat16)))
    model = load(tmp_path, POLICIES, attention="eager", session=session)
    model.generation_config = stock.generation_config
    for name, worth in published.items():
        weight = model.get_parameter(name)
        assert weight.dtype is torch.bfloat16
        assert torch.equal(weight.double(), worth), name
        assert set(session.bytes_per_node(weight.data_ptr(), weight.nbytes)) == {1}
    assert torch.equal(generate(model), expected)
    with offload(model, POLICIES, session=session) as done:
        held = {kind: use.live_bytes for (kind, _), use in done.store.use().items()}
        tokens = generate(model)
        assert done.calls.kernel > 0
    assert held.keys() <= {"kv"}, "weights lie there already"
    assert torch.equal(tokens, expected)
    assert torch.equal(generate(model), expected)
