"""Which model to run: a Hugging Face OPT folder, a FlexGen folder or a known name; all local.

Everything is checked from configuration, file headers and file sizes, so that a folder that is
missing, truncated or of another architecture is refused in one line before anything is allocated.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flexgen.flex_opt import DUMMY_WEIGHT
from flexgen.opt_config import OptConfig, get_opt_config

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.flexgen.seeded import opt_weight_shapes
from cxl_offload.integrations.model_folder import (
    check_flexgen_model,
    is_flexgen_folder,
    unknown_name,
)

_OPT_PAD = 1
_ACTIVATIONS = ("relu", "gelu")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that can be loaded without asking anybody.

    Parameters
    ----------
    config
        FlexGen's description of it; ``activation_fn`` is ``relu`` (OPT) or ``gelu`` (Galactica).
    kind
        ``checkpoint``: Hugging Face files, to be converted; ``np``: FlexGen's files; ``dummy``: no
        files, weights of ones.
    folder
        Where the files are.
    cache
        For a checkpoint: the ``-np`` folder to convert into and keep; ``None`` makes a temporary
        one.
    """

    config: OptConfig
    kind: Literal["checkpoint", "np", "dummy"]
    folder: Path
    cache: Path | None = None

    @property
    def parameters(self) -> int:
        """Parameters of the model, the shared embedding counted once."""
        return sum(math.prod(shape) for shape in weight_shapes(self.config).values())


def resolve_model(model: str, path: str | None) -> ModelSource:
    """Find the model that ``--model`` and ``--path`` name.

    Raises
    ------
    ConfigError
        No such folder, files missing or truncated, or an architecture FlexGen does not compute.
    """
    folder = Path(model).expanduser()
    dummy = path is not None and DUMMY_WEIGHT in path
    check_flexgen_model(model, dummy=dummy)
    if (folder / "config.json").is_file():
        config = config_of_checkpoint(folder)
        if dummy:
            return ModelSource(config, "dummy", Path(str(path)))
        if is_flexgen_folder(folder):
            check_np_folder(folder, config)
            return ModelSource(config, "np", folder)
        cache = None if path is None else Path(path).expanduser() / f"{config.name}-np"
        return ModelSource(config, "checkpoint", folder, cache)
    if folder.is_dir() and not dummy:
        return _np_source(folder, _named_config(folder.name.removesuffix("-np"), folder))
    config = _known_config(model)
    if dummy:
        return ModelSource(config, "dummy", Path(str(path)))
    weights = Path(path or "~/opt_weights").expanduser() / f"{config.name}-np"
    if not weights.is_dir():
        raise ConfigError(
            f"model {model}: {weights} does not exist; nothing is downloaded, so give --path with "
            f"its {config.name}-np folder, a checkpoint folder, or --path _DUMMY_"
        )
    return _np_source(weights, config)


def _np_source(folder: Path, config: OptConfig) -> ModelSource:
    check_np_folder(folder, config)
    return ModelSource(config, "np", folder)


def _known_config(model: str) -> OptConfig:
    try:
        config = get_opt_config(model)
    except NotImplementedError:
        raise ConfigError(f"model {model}: FlexGen does not compute its architecture") from None
    except ValueError:
        raise unknown_name(model) from None
    if "galactica" in config.name:
        config = replace(config, activation_fn="gelu")
    return config


def _named_config(name: str, folder: Path) -> OptConfig:
    try:
        return _known_config(name)
    except ConfigError:
        raise ConfigError(
            f"model folder {folder}: the number of heads is not in FlexGen's files; put the "
            f"checkpoint's config.json next to them"
        ) from None


def config_of_checkpoint(folder: Path) -> OptConfig:
    """FlexGen's configuration from a checkpoint's ``config.json``.

    Raises
    ------
    ConfigError
        Not an OPT model, or one whose arithmetic FlexGen would get wrong.
    """
    where = folder / "config.json"
    try:
        raw = json.loads(where.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from None
    if not isinstance(raw, dict) or raw.get("model_type") != "opt":
        kind = raw.get("model_type") if isinstance(raw, dict) else None
        raise ConfigError(f"{where}: model_type {kind!r}; FlexGen computes OPT and Galactica only")
    _check_architecture(where, raw)
    hidden = _whole(where, raw, "hidden_size")
    return OptConfig(
        name=re.sub(r"[^a-z0-9._-]", "-", folder.resolve().name.lower()).removesuffix("-np"),
        num_hidden_layers=_whole(where, raw, "num_hidden_layers"),
        max_seq_len=_whole(where, raw, "max_position_embeddings"),
        hidden_size=hidden,
        input_dim=hidden,
        n_head=_whole(where, raw, "num_attention_heads"),
        ffn_embed_dim=4 * hidden,
        vocab_size=_whole(where, raw, "vocab_size"),
        pad=_pad_token(where, raw),
        pad_token_id=_pad_token(where, raw),
        activation_fn=str(raw.get("activation_function", "relu")),
    )


def _pad_token(where: Path, raw: Mapping[str, Any]) -> int:
    """OPT's where the file has none, or null."""
    value = raw.get("pad_token_id")
    if value is None:
        return _OPT_PAD
    vocabulary = _whole(where, raw, "vocab_size")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocabulary:
        raise ConfigError(
            f"{where}: pad_token_id is {value!r}, expected a token of the {vocabulary}, or null"
        )
    return value


def _check_architecture(where: Path, raw: Mapping[str, Any]) -> None:
    hidden = _whole(where, raw, "hidden_size")
    heads = _whole(where, raw, "num_attention_heads")
    wanted: dict[str, tuple[Any, Any]] = {
        "do_layer_norm_before": (raw.get("do_layer_norm_before", True), True),
        "word_embed_proj_dim": (raw.get("word_embed_proj_dim") or hidden, hidden),
        "ffn_dim": (raw.get("ffn_dim", 4 * hidden), 4 * hidden),
        "tie_word_embeddings": (raw.get("tie_word_embeddings", True), True),
        "_remove_final_layer_norm": (raw.get("_remove_final_layer_norm", False), False),
    }
    for key, (value, expected) in wanted.items():
        if value != expected:
            raise ConfigError(f"{where}: {key} is {value}, FlexGen computes only {expected}")
    activation = raw.get("activation_function", "relu")
    if activation not in _ACTIVATIONS:
        raise ConfigError(f"{where}: activation_function {activation!r} is not relu or gelu")
    if hidden % heads != 0:
        raise ConfigError(f"{where}: hidden_size {hidden} is no multiple of {heads} heads")


def _whole(where: Path, raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{where}: {key} is {value!r}, expected a whole number above 0")
    return value


def weight_shapes(config: OptConfig) -> dict[str, tuple[int, ...]]:
    """File name and shape of every weight FlexGen reads for this model."""
    return opt_weight_shapes(
        layers=config.num_hidden_layers,
        hidden=config.input_dim,
        vocab=config.vocab_size,
        positions=config.max_seq_len,
    )


def check_np_folder(folder: Path, config: OptConfig) -> None:
    """Refuse a FlexGen weight folder with a file missing, truncated or of another shape.

    Raises
    ------
    ConfigError
        Names the first such file.
    """
    for name, shape in weight_shapes(config).items():
        file = folder / name
        try:
            with file.open("rb") as handle:
                found, dtype, end = _read_header(handle)
        except FileNotFoundError:
            raise ConfigError(f"{file}: missing; the weight folder is not complete") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: not a numpy file ({error})") from None
        if found != shape or dtype != np.float16:
            raise ConfigError(
                f"{file}: {dtype} {found}, the model needs float16 {shape}; convert it again"
            )
        size = file.stat().st_size
        if size != end + 2 * math.prod(shape):
            raise ConfigError(
                f"{file}: {size} bytes, {end + 2 * math.prod(shape)} expected; it is truncated"
            )


def _read_header(handle: Any) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    version = np.lib.format.read_magic(handle)  # type: ignore[no-untyped-call]
    read: Any = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, fortran, dtype = read(handle)
    if fortran:
        raise ValueError("Fortran order")
    return shape, dtype, handle.tell()
