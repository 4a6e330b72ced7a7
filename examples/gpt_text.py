"""Real text that every machine has, and a tokenizer of bytes made on the spot."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import needs_transformers  # noqa: F401
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
FIRST_BYTE = len(SPECIAL)
END = SPECIAL.index("</s>")
VOCABULARY = 272
"""4 special tokens and 256 bytes, rounded up to a multiple of 16."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte after OPT's special tokens; text begins with ``</s>``, as OPT's does."""
    tokens = dict(zip(SPECIAL, range(FIRST_BYTE), strict=True))
    for byte, letter in enumerate(_letters()):
        tokens[letter] = FIRST_BYTE + byte
    made = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", END)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="</s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _letters() -> list[str]:
    """The printable letter that byte-level tokenizers write for every byte (GPT-2's table)."""
    plain = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, extra = [], 0
    for byte in range(256):
        letters.append(chr(byte if byte in plain else 256 + extra))
        extra += byte not in plain
    return letters


def library_files() -> list[Path]:
    """The sources of Python's standard library, in an order that is random but always the same."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib"}
    found = sorted(path for path in root.rglob("*.py") if not skipped & set(path.parts))
    random.Random(0).shuffle(found)
    return found


def library_tokens(limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens to train on and to validate on, from different files; ``limit`` bytes together."""
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    total = 0
    for number, path in enumerate(library_files()):
        text = path.read_bytes()[: limit - total]
        total += len(text)
        encoded = np.frombuffer(text, dtype=np.uint8).astype(np.int16) + FIRST_BYTE
        parts[number % 10 == 9].append(np.concatenate(([END], encoded)).astype(np.int16))
        if total >= limit and parts[1]:
            break
    return np.concatenate(parts[0]), np.concatenate(parts[1])


def windows(tokens: np.ndarray, rows: int, length: int, *, seed: int) -> Iterator[torch.Tensor]:
    """Batches of int64 ``(rows, length)`` from random places, without end."""
    chosen = np.random.default_rng(seed)
    while True:
        starts = chosen.integers(0, len(tokens) - length, size=rows)
        batch = np.stack([tokens[start : start + length] for start in starts])
        yield torch.from_numpy(batch.astype(np.int64))
