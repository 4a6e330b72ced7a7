"""Texts as token ids, by the tokenizer beside a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.model_folder import base_of_adapter
from cxl_offload.integrations.transformers.checkpoint import ModelFiles
from cxl_offload.integrations.transformers.config_checks import GGUF, warnings_kept
from cxl_offload.integrations.transformers.read_errors import UNREADABLE, first_line

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
"""Files of which an adapter's folder has one, unless its tokenizer is that of the model."""


def tokenized(folder: Path, prompts: Sequence[str]) -> tuple[Any, Any]:
    """Token ids and mask ``(rows, tokens)``, padded on the left, and the tokenizer.

    Raises
    ------
    ConfigError
        In one line: no tokenizer there, or one that cannot pad.
    """
    base = base_of_adapter(folder)
    if base is not None and not any((folder / name).is_file() for name in _TOKENIZER):
        folder = base
    found = ModelFiles.at(folder) if folder.suffix == GGUF else ModelFiles(folder)
    try:
        with warnings_kept(told=False):  # of the model, and told when that was made
            tokenizer = AutoTokenizer.from_pretrained(
                found.folder, padding_side="left", **found.options()
            )
    except UNREADABLE as error:
        if (folder / "config.json").is_file():
            found.config()  # where that is wrong, it is no fault of the tokenizer
        why = first_line(error)
        if folder.is_dir() and not any((folder / name).exists() for name in _TOKENIZER):
            why = f"neither {' nor '.join(_TOKENIZER)} is there"
        raise ConfigError(f"no tokenizer in {folder}: {why}; name one by --tokenizer") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None and len(prompts) > 1:
        raise ConfigError(f"the tokenizer in {folder} cannot pad: it has no pad and no eos token")
    padding = len(prompts) > 1
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=padding)
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}, tokenizer
