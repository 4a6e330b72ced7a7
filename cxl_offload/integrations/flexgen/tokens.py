"""Text to tokens without a hub: the model folder's own tokenizer, or one of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.flexgen.model import ModelSource
from cxl_offload.integrations.flexgen.request import FlexGenRun

_FILES = ("tokenizer.json", "vocab.json")


class Tokenizer(Protocol):
    """Turns text into tokens and back."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt, the beginning-of-text token first."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""


class ByteTokenizer:
    """One token a byte, after OPT's four special tokens; needs no file.

    Tokens of a larger vocabulary that stand for no byte are shown as ``<number>``; bytes that are
    no UTF-8 as ``\\xNN``.
    """

    BEGIN, PAD, END, UNKNOWN = 2, 1, 2, 3
    FIRST_BYTE = 4
    VOCABULARY = 260

    def encode(self, text: str) -> list[int]:
        return [self.BEGIN, *(self.FIRST_BYTE + byte for byte in text.encode("utf-8"))]

    def decode(self, tokens: Sequence[int]) -> str:
        text: list[str] = []
        run = bytearray()
        for token in tokens:
            if self.FIRST_BYTE <= token < self.VOCABULARY:
                run.append(token - self.FIRST_BYTE)
                continue
            text.append(run.decode("utf-8", "backslashreplace"))
            run.clear()
            if token >= self.VOCABULARY:
                text.append(f"<{token}>")
        text.append(run.decode("utf-8", "backslashreplace"))
        return "".join(text)


class LocalTokenizer:
    """A Hugging Face tokenizer from files of a folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, padding_side="left"
        )

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer(text).input_ids]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def load_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a model folder.

    Parameters
    ----------
    folder
        Where the model is; its tokenizer files are used when there are any.
    vocab_size
        Tokens the model knows.

    Raises
    ------
    ConfigError
        The files cannot be read, or the vocabulary is too small for bytes.
    """
    if _has_tokenizer(folder):
        try:
            return LocalTokenizer(folder)
        except Exception as error:  # transformers raises a different class for every damage
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"{folder}: its tokenizer cannot be read ({first})") from None
    if vocab_size < ByteTokenizer.VOCABULARY:
        raise ConfigError(
            f"{folder}: no tokenizer files, and a vocabulary of {vocab_size} is too small for the "
            f"{ByteTokenizer.VOCABULARY} tokens of the byte-level one"
        )
    return ByteTokenizer()


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _FILES)


def pad_prompts(
    prompts: Sequence[Sequence[int]], prompt_len: int | None, pad: int, vocab_size: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """Prompts of one length, padded on the left.

    Parameters
    ----------
    prompts
        Tokens of every prompt.
    prompt_len
        The common length; ``None`` takes the longest prompt's.
    pad, vocab_size
        Of the model.

    Returns
    -------
    numpy.ndarray
        int32 ``(prompts, prompt_len)``.

    Raises
    ------
    ConfigError
        A prompt is longer than ``prompt_len``, has nothing to attend to, or has a token the model
        does not know.
    """
    longest = max(len(prompt) for prompt in prompts)
    length = longest if prompt_len is None else prompt_len
    if longest > length:
        raise ConfigError(f"a prompt has {longest} tokens, --prompt-len is {length}; raise it")
    rows = np.full((len(prompts), length), pad, dtype=np.int32)
    for at, prompt in enumerate(prompts):
        if not any(token != pad for token in prompt):
            raise ConfigError(f"prompt {at + 1} is empty")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ConfigError(
                f"prompt {at + 1} has token {max(prompt)}, the model knows 0 to {vocab_size - 1}"
            )
        rows[at, length - len(prompt) :] = prompt
    return rows


def prompt_tokens(
    request: FlexGenRun, source: ModelSource
) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.int32]], Tokenizer | None]:
    """The padded prompts of a request, and the tokenizer that made them if they were text.

    Returns
    -------
    numpy.ndarray
        int32 ``(rows, prompt_len)``.

    Raises
    ------
    ConfigError
        As :func:`load_tokenizer` and :func:`pad_prompts`.
    """
    config = source.config
    tokenizer = None
    rows = [list(row) for row in request.token_ids]
    if request.prompts:
        folder = source.folder if request.tokenizer is None else Path(request.tokenizer)
        if request.tokenizer is not None and not _has_tokenizer(folder):
            raise ConfigError(f"--tokenizer {folder}: none of {', '.join(_FILES)} in it")
        tokenizer = load_tokenizer(folder, config.vocab_size)
        rows = [tokenizer.encode(text) for text in request.prompts]
    padded = pad_prompts(rows, request.prompt_len, config.pad_token_id, config.vocab_size)
    return padded, tokenizer
