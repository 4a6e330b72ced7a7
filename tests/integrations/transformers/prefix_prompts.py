"""Prompts with a beginning in common, and stores for it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from cxl_offload.integrations.transformers import KeptPrefixes, Offloaded, PrefixCounts

from .models import ONLY_EAGER, PAD, VOCAB

CXL = {"kv": "bind:2"}
BLOCK = 4


def kept(name: str | None = None, nbytes: int | str = "4MiB") -> KeptPrefixes:
    return KeptPrefixes(bytes=nbytes, persist=name, block_tokens=BLOCK)


def texts(*padding: int, length: int = 30, seed: int = 1, own: int = 3) -> dict[str, Any]:
    """A row for each padding: the same text in all of them, with ends of their own."""
    numbers = torch.Generator().manual_seed(seed)
    text = torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(9))
    ids = torch.full((len(padding), length), PAD)
    mask = torch.zeros_like(ids)
    for row, pads in enumerate(padding):
        ids[row, pads:] = text[: length - pads]
        ids[row, length - own :] = torch.randint(3, VOCAB, (own,), generator=numbers)
        mask[row, pads:] = 1
    return {"input_ids": ids, "attention_mask": mask}


def own_of(family: str) -> str:
    return "eager" if family in ONLY_EAGER else "sdpa"


def computed_tokens(model: PreTrainedModel) -> list[int]:
    """Grows by the tokens of every forward pass, from now on."""
    seen: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda _, args: seen.append(int(args[0].shape[1]))
    )
    return seen


def counts_of(done: Offloaded) -> PrefixCounts:
    assert done.prefixes is not None
    return done.prefixes


def forget(model: PreTrainedModel) -> None:
    """Other weights, in the same memory."""
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[:8] *= -1
