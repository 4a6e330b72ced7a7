"""A LLaMA of two layers with a tokenizer of single bytes, made here: no network.

The seeded weights are tripled, which spreads the logits so far that greedy tokens depend on what
is in the KV cache; with vLLM's dummy weights they do not.

Engines run it in float32. The two best logits of some tokens are 0.01 apart. bfloat16 moves logits
by up to 0.6, so that the rows of a batch may decide between the two, and a test would see a wrong
KV cache in that. float32 moves them by 0.00003 (test_tiny_model.py).
"""

from __future__ import annotations

from pathlib import Path

WORDS = 512

DTYPE = "float32"

CHUNK = 32768
"""Bytes of a block of 32 tokens in the KV cache of the model, as :data:`DTYPE`."""


def make_model(folder: Path) -> None:
    """Writes weights, configuration and tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<pad>", "<s>", "</s>", *alphabet]
    names += [f"<x{number}>" for number in range(len(names), WORDS)]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=2048,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0)
    model.to(torch.bfloat16).save_pretrained(folder)


def prompt(seed: int, tokens: int = 300) -> list[int]:
    """Token ids that no other seed begins with."""
    return [
        (seed * 131 + 7 * position + position * position % 11) % (WORDS - 3) + 3
        for position in range(tokens)
    ]
