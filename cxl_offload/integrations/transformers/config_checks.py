"""What a model's configuration says that cannot be, before anything is built of it.

transformers takes most numbers for granted: layers without end would be built one by one, and a
division by zero does not say of what. So sizes are looked at in the file itself, and what the
libraries raise is told with the key that has the value which they do not know.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import DynamicCache
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from cxl_offload.errors import ConfigError
from cxl_offload.files import shown
from cxl_offload.integrations.transformers.read_errors import UNREADABLE, KeptWarnings, unreadable

GGUF = ".gguf"
"""How names of such files end."""

MOST_LAYERS = 2000
"""Of a model: ten times what the deepest ones have, and built without weights in seconds."""

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "head_dim", "intermediate_size", "ffn_dim")
_SIZES = (
    *(*_LAYERS, *_HEADS, "num_key_value_heads", *_WIDTHS, "vocab_size"),
    *("max_position_embeddings", "n_positions", "decoder_sparse_step"),
)
"""Keys of numbers that are 1 or more in every decoder. Lists with one for each layer pass."""
_ROPES = ("rope_parameters", "rope_scaling")
_BASES = ("rope_theta", "rope_local_base_freq", "rotary_emb_base")
_ROTARY = (
    *("factor", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "original_max_position_embeddings"),
)
"""Keys of what positions are turned by. With 0 some divide by it, and make tokens of nonsense."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_WARN = ("transformers.configuration_utils", "transformers.modeling_rope_utils")
_MOST_LEVELS = 20


@contextmanager
def warnings_kept(*, told: bool = True) -> Iterator[None]:
    """Keeps back what transformers warns of a configuration.

    It is told when the block ends without an error, and ``told``: else somebody reads it again.
    """
    kept = [KeptWarnings(logging.getLogger(name)) for name in _WARN]
    for each in kept:
        each.begin()
    try:
        yield
    except BaseException:
        told = False
        raise
    finally:
        for each in kept:
            each.end()
            if told:
                each.tell()


@contextmanager
def described_by(file: Path) -> Iterator[None]:
    """For what transformers makes by a configuration: names its file, and the key where it can."""
    try:
        with warnings_kept(), unreadable(file):
            yield
    except ConfigError as error:
        unknown = _unknown_value(error.__cause__)
        where = next((key for key, value in _values(_said(file)) if value == unknown), None)
        if where is None:
            raise
        said = f"{shown(unknown)} is none that transformers knows"
        raise ConfigError(f"{file}: {where}: {said}") from error


def check_sizes(file: Path) -> None:
    """Refuse sizes that no model has.

    Raises
    ------
    ConfigError
        Names the file, the key and its value.
    """
    said = _said(file)
    for prefix, part in (("", said), ("text_config.", said.get("text_config"))):
        if not isinstance(part, Mapping):
            continue
        for key in _SIZES:
            _check_size(file, f"{prefix}{key}", part.get(key), key in _LAYERS)
        _check_heads(file, prefix, part)
        _check_experts(file, prefix, part)
        _check_positions(file, prefix, part)


def check_windows(file: Path, config: Any) -> None:
    """Refuse a decoder that follows the conventions with layers that attend to no position.

    Raises
    ------
    ConfigError
        Names the file and the window.
    """
    for layer in DynamicCache(config=config).layers:
        window = getattr(layer, "sliding_window", 1)
        if window < 1:
            raise ConfigError(f"{file}: sliding_window: must be at least 1, not {window}")


def _check_size(file: Path, key: str, value: Any, is_layers: bool) -> None:
    if not _is_whole(value):
        return  # the configuration's class says what else it takes
    if value < 1:
        raise ConfigError(f"{file}: {key}: must be at least 1, not {value}")
    if is_layers and value > MOST_LAYERS:
        raise ConfigError(f"{file}: {key}: must be at most {MOST_LAYERS}, not {value}")


def _check_heads(file: Path, prefix: str, said: Mapping[str, Any]) -> None:
    heads = next((said[key] for key in _HEADS if _is_whole(said.get(key))), None)
    shared = said.get("num_key_value_heads")
    if heads is not None and isinstance(shared, int) and heads % shared:
        raise ConfigError(
            f"{file}: {prefix}num_key_value_heads: {heads} heads of attention are no multiple of "
            f"{shared}"
        )


def _check_experts(file: Path, prefix: str, said: Mapping[str, Any]) -> None:
    asked = said.get("num_experts_per_tok")
    key = next((key for key in _EXPERTS if _is_whole(said.get(key))), None)
    if key is None:
        return
    if said[key] < 0:
        raise ConfigError(f"{file}: {prefix}{key}: must be at least 0, not {said[key]}")
    if said[key] and isinstance(asked, int) and not 1 <= asked <= said[key]:
        raise ConfigError(
            f"{file}: {prefix}num_experts_per_tok: must be at least 1 and at most the {said[key]} "
            f"of {key}, not {asked}"
        )


def _check_positions(file: Path, prefix: str, said: Mapping[str, Any]) -> None:
    for key, value in _rotary_numbers(said):
        for number in value if isinstance(value, list) else [value]:
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if is_number and not 0 < number < math.inf:
                raise ConfigError(
                    f"{file}: {prefix}{key}: must be finite and above 0, not {number}"
                )


def _rotary_numbers(said: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Those of all layers, and of each kind of layers where they differ."""
    yield from ((key, said[key]) for key in _BASES if key in said)
    for name in _ROPES:
        asked = said.get(name)
        if not isinstance(asked, Mapping):
            continue
        kinds = {
            f"{name}.{kind}": part for kind, part in asked.items() if isinstance(part, Mapping)
        }
        for where, part in {name: asked, **kinds}.items():
            yield from ((f"{where}.{key}", part[key]) for key in _BASES + _ROTARY if key in part)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _said(file: Path) -> Mapping[str, Any]:
    """What a file says of a model, by transformers' keys.

    Nothing where it cannot be read, which the libraries tell.
    """
    try:
        if file.suffix == GGUF:
            return load_gguf_checkpoint(str(file), return_tensors=False)["config"]  # type: ignore[no-any-return]
        said = json.loads(file.read_text(encoding="utf-8"))
    except UNREADABLE:
        return {}
    return said if isinstance(said, dict) else {}


def _unknown_value(cause: BaseException | None) -> str | None:
    """A name that a library looked up in vain: of a type, a function, a kind of positions."""
    if isinstance(cause, KeyError) and cause.args:
        return str(cause.args[0])
    return cause.name if isinstance(cause, AttributeError) else None


def _values(said: Any, where: str = "", level: int = 0) -> Iterator[tuple[str, str]]:
    """Every text in a configuration, with the keys that lead to it."""
    if isinstance(said, str):
        yield where, said
    elif isinstance(said, Mapping) and level < _MOST_LEVELS:
        for key, value in said.items():
            yield from _values(value, f"{where}.{key}".lstrip("."), level + 1)
