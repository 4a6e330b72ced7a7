"""What the files of a model say before any framework is loaded: a wrong name costs no waiting."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cxl_offload.errors import ConfigError

_NAME = re.compile(r"([^/]*/)?(opt|galactica)-", re.IGNORECASE)
"""Names of FlexGen begin so; which of them it knows, FlexGen says."""


_ADAPTER = "adapter_config.json"


def base_of_adapter(folder: Path) -> Path | None:
    """The folder of the model that a PEFT adapter in ``folder`` adapts; None: no adapter is there.

    Raises
    ------
    ConfigError
        The adapter names no folder of a model.
    """
    file = folder / _ADAPTER
    if (folder / "config.json").is_file() or not file.is_file():
        return None
    try:
        said = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{file}: names no base_model_name_or_path ({error})") from error
    if not isinstance(said, str) or not (Path(said) / "config.json").is_file():
        raise ConfigError(
            f"{file}: base_model_name_or_path {said} is no folder of a model here, and nothing is "
            "downloaded; write the path of the folder there"
        )
    return Path(said)


def check_checkpoint(model: str) -> None:
    """Refuses what is no GGUF file and no folder of a model or of an adapter (ConfigError)."""
    folder = Path(model)
    if folder.suffix == ".gguf" and folder.is_file():
        return
    if not folder.is_dir():
        raise ConfigError(f"--model {model}: there is no such folder; nothing is downloaded")
    if not (folder / "config.json").is_file() and base_of_adapter(folder) is None:
        raise ConfigError(f"--model {model}: no config.json in this folder")


def is_flexgen_folder(folder: Path) -> bool:
    """Whether FlexGen's own weight files are there."""
    return (folder / "decoder.embed_tokens.weight").is_file()


def check_flexgen_model(model: str, *, dummy: bool = False) -> None:
    """Refuses what is neither a folder that FlexGen reads nor looks like a name that it knows.

    Parameters
    ----------
    model
        Folder or name.
    dummy
        Whether weights of ones are asked for, which need no files.

    Raises
    ------
    ConfigError
        Says which of the two it would have to be.
    """
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return
    if folder.is_dir() and not dummy:
        if not is_flexgen_folder(folder):
            raise ConfigError(
                f"model folder {folder}: no config.json and no decoder.embed_tokens.weight; "
                f"give a Hugging Face OPT checkpoint or a FlexGen -np folder"
            )
        return
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ConfigError(f"model folder {model} does not exist")
    if not _NAME.match(model):
        raise unknown_name(model)


def unknown_name(model: str) -> ConfigError:
    """The error for a name that is no folder and that FlexGen does not know."""
    return ConfigError(
        f"model {model}: no such folder, and no OPT or Galactica model that FlexGen knows"
    )
