"""Keys of the blocks of a prompt: a chain of hashes over its tokens."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt of a batch.

    Attributes
    ----------
    padding
        Columns before its first token.
    keys
        Of its whole blocks, in order; block ``j`` begins ``j`` blocks behind the padding.
    usable
        How many of them may be read: at least one token is left to compute, or there would be no
        logits.
    """

    padding: int
    keys: tuple[bytes, ...]
    usable: int


def chain(root: bytes, tokens: Sequence[int], block_tokens: int) -> tuple[bytes, ...]:
    """Keys of all whole blocks of a text.

    Each key is the SHA-256 of the key before it and of the tokens of its block, so that it stands
    for all tokens up to its end, and for what ``root`` stands for.
    """
    form, key, keys = struct.Struct(f"<{block_tokens}q"), root, []
    for begin in range(0, len(tokens) - block_tokens + 1, block_tokens):
        key = hashlib.sha256(key + form.pack(*tokens[begin : begin + block_tokens])).digest()
        keys.append(key)
    return tuple(keys)


def prompt_rows(
    root: bytes, ids: torch.Tensor, mask: torch.Tensor | None, block_tokens: int
) -> list[PromptRow] | None:
    """The prompts of a batch; None where one is not padded on its left only.

    Parameters
    ----------
    ids
        ``(rows, columns)``.
    mask
        Of the same shape, 0 where there is no token; None: tokens everywhere.
    """
    rows, columns = ids.shape
    padded = [0] * rows
    if mask is not None:
        if mask.shape != ids.shape:
            return None
        tokens = mask.ne(0)
        if not bool((tokens[:, 1:] >= tokens[:, :-1]).all()) or not bool(tokens[:, -1].all()):
            return None
        padded = (columns - tokens.sum(1)).tolist()
    made = []
    for padding, row in zip(padded, ids.tolist(), strict=True):
        keys = chain(root, row[padding:], block_tokens)
        made.append(PromptRow(padding, keys, (columns - padding - 1) // block_tokens))
    return made


def shared_columns(rows: Sequence[PromptRow], found: Sequence[int], block_tokens: int) -> int:
    """Columns of a batch that need not be computed, where so many blocks of each row are there.

    All rows of a cache are equally long, so it is what the row with the least has; a block of
    another row may be read in part. Padding needs nothing.
    """
    return min(
        row.padding + min(blocks, row.usable) * block_tokens
        for row, blocks in zip(rows, found, strict=True)
    )
