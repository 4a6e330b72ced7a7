"""Models from their Hugging Face ``config.json``, or the model files of the package.

A model file (configs/models/NAME.yaml) has ``source`` and ``config``, the latter with the keys of
a ``config.json``. Nothing is loaded but the configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cxl_offload.errors import ConfigError, printable
from cxl_offload.files import (
    read_document,
    read_text,
    shipped_file,
    shipped_names,
)
from cxl_offload.plan.model.config import ModelConfig
from cxl_offload.plan.model.read_decoder import DECODERS, quantization, read_decoder
from cxl_offload.plan.model.reader import ConfigReader


def model_names() -> tuple[str, ...]:
    """Names of the model files that come with the package."""
    return shipped_names("models")


def load_model(name_or_path: str | Path) -> ModelConfig:
    """The model of a checkpoint folder, a ``config.json``, a model file, or a shipped name.

    Raises
    ------
    ConfigError
        No such model, or a configuration that is wrong; with file and line.
    """
    wanted = Path(name_or_path).expanduser()
    short = str(name_or_path).lower().rpartition("/")[2]
    if wanted.is_dir():
        name, file = wanted.resolve().name, wanted / "config.json"
    elif wanted.suffix in (".json", ".yaml", ".yml"):
        name, file = (
            wanted.resolve().parent.name if wanted.stem == "config" else wanted.stem,
            wanted,
        )
    elif short in model_names():
        name, file = short, shipped_file("models", short)
    elif wanted.exists():
        raise ConfigError(
            f"model {name_or_path}: a model's file ends in .json, .yaml or .yml; give the "
            "config.json of a checkpoint, or its folder"
        )
    else:
        raise ConfigError(
            f"model {name_or_path}: no such folder or file, and no model file of that name; known: "
            f"{', '.join(model_names())}"
        )
    return parse_model(read_text(file), name=printable(name), file=str(file))


def parse_model(text: str, *, name: str, file: str) -> ModelConfig:
    """The model of the text of a ``config.json`` or of a model file (``source``, ``config``).

    Raises
    ------
    ConfigError
        With file and line, for what is missing, no whole number, or another architecture.
    """
    document = read_document(text, file=file)
    entries = document.entries()
    if "model_type" not in entries and "config" in entries:
        parts = document.mapping(["source", "config"])
        document = parts["config"]
        entries = document.entries()
    if "model_type" not in entries:
        document.fail("key 'model_type' is missing")
    if "text_config" in entries and entries["model_type"].text() not in _READERS:
        document = entries["text_config"]  # the language model of one that sees, too
        entries = {**entries, **document.entries()}
    family = entries["model_type"].text()
    reader = _READERS.get(family)
    if reader is None:
        entries["model_type"].fail(f"{family!r} is unknown; known are {', '.join(_READERS)}")
    read = reader(ConfigReader(document, entries, name, family))
    if "quantization_config" not in entries:
        return read
    return replace(read, quantization=quantization(entries["quantization_config"]))


def _read_opt(r: ConfigReader) -> ModelConfig:
    hidden, heads = r.whole("hidden_size"), r.whole("num_attention_heads")
    norm_first = r.flag("do_layer_norm_before", True)
    return ModelConfig(
        name=r.name,
        family="opt",
        layers=r.whole("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=r.divides("num_attention_heads", heads, hidden, "hidden_size"),
        ffn=r.whole("ffn_dim", 4 * hidden),
        vocab=r.whole("vocab_size"),
        positions=r.whole("max_position_embeddings"),
        embed_dim=r.whole("word_embed_proj_dim", hidden),
        tied=r.flag("tie_word_embeddings", True),
        attention_bias=True,
        final_norm=norm_first and not r.flag("_remove_final_layer_norm", False),
        norm_first=norm_first,
        activation=r.word("activation_function", "relu"),
    )


def _read_gpt2(r: ConfigReader) -> ModelConfig:
    hidden, heads = r.whole("n_embd"), r.whole("n_head")
    return ModelConfig(
        name=r.name,
        family="gpt2",
        layers=r.whole("n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=r.divides("n_head", heads, hidden, "n_embd"),
        ffn=r.whole("n_inner", 4 * hidden),
        vocab=r.whole("vocab_size"),
        positions=r.whole("n_positions"),
        embed_dim=hidden,
        tied=r.flag("tie_word_embeddings", True),
        attention_bias=True,
        activation=r.word("activation_function", "gelu_new"),
    )


def _read_bert(r: ConfigReader) -> ModelConfig:
    hidden, heads = r.whole("hidden_size"), r.whole("num_attention_heads")
    return ModelConfig(
        name=r.name,
        family="bert",
        layers=r.whole("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=r.divides("num_attention_heads", heads, hidden, "hidden_size"),
        ffn=r.whole("intermediate_size"),
        vocab=r.whole("vocab_size"),
        positions=r.whole("max_position_embeddings"),
        embed_dim=hidden,
        tied=True,
        attention_bias=True,
        activation=r.word("hidden_act", "gelu"),
        token_types=r.whole("type_vocab_size", 2),
    )


_READERS: dict[str, Callable[[ConfigReader], ModelConfig]] = {
    "opt": _read_opt,
    "gpt2": _read_gpt2,
    "bert": _read_bert,
    **dict.fromkeys(DECODERS, read_decoder),
}
