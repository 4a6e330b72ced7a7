"""Weights whose memory failed, read again from the file that they came from."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from cxl_offload.errors import ConfigError
from cxl_offload.memory.lost import add_owner, lost_ranges

_INDEX = "model.safetensors.index.json"
_ONE_FILE = "model.safetensors"
_log = logging.getLogger(__name__)


def keys_to_files(folder: Path) -> dict[str, str]:
    """Every tensor of a checkpoint, and the file that has it.

    Raises
    ------
    ConfigError
        The index of the files says something else.
    OSError, ValueError, SafetensorError
        It, or the only file, cannot be read.
    """
    index = folder / _INDEX
    if index.is_file():
        said = json.loads(index.read_text(encoding="utf-8"))
        files = said.get("weight_map") if isinstance(said, dict) else None
        if not isinstance(files, dict) or not all(type(each) is str for each in files.values()):
            raise ConfigError(f"{index}: no weight_map of tensors and their files")
        return files
    with safe_open(folder / _ONE_FILE, framework="pt") as file:
        return dict.fromkeys(file.keys(), _ONE_FILE)


def _candidates(name: str, keys: Mapping[str, str]) -> Iterator[str]:
    """What a weight may be called in a file: its name, or one that begins further out or in."""
    if name in keys:
        yield name
    yield from (key for key in keys if key != name and key.endswith(f".{name}"))
    yield from (key for key in keys if key != name and name.endswith(f".{key}"))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


class FileWeights:
    """An owner of memory (:class:`cxl_offload.memory.lost.MemoryOwner`): a model's weights.

    What a file has is taken for a weight only if all bytes of it that are not lost are the same:
    a weight that was trained, merged or quantized since, or put together from several, is not
    had again.

    Parameters
    ----------
    folder
        A checkpoint in files of safetensors; of others nothing is had again.
    """

    tells_itself = False

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._names: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()
        add_owner(self)

    def add(self, name: str, weight: torch.Tensor) -> None:
        """A contiguous tensor that holds a weight of that name, as long as it lives."""
        self._names[weight] = name

    def forget(self) -> None:
        """All of them; who asks for this keeps the owner until then."""
        self._names.clear()

    def _find(self, address: int) -> tuple[str, torch.Tensor] | None:
        for weight, name in list(self._names.items()):
            begin = weight.data_ptr()
            if begin <= address < begin + weight.nbytes:
                return name, weight
        return None

    def named(self, address: int) -> tuple[str, int] | None:
        """As of the owner of memory."""
        found = self._find(address)
        return None if found is None else (f"weight {found[0]}", found[1].data_ptr())

    @torch.no_grad()
    def restore(self, address: int, nbytes: int) -> bool:
        """As of the owner of memory."""
        found = self._find(address)
        if found is None or not found[1].is_contiguous():
            return False
        name, weight = found
        begin = weight.data_ptr()
        here = _bytes(weight.detach())
        for read in self._read(name, weight):
            same = read == here
            for at, count in lost_ranges(begin, weight.nbytes):
                same[at - begin : at - begin + count] = True
            if same.all():
                lost = slice(address - begin, address - begin + nbytes)
                here[lost] = read[lost]
                _log.warning("weight %s: read again from %s", name, self.folder)
                return lost.stop <= weight.nbytes
        return False

    def _read(self, name: str, weight: torch.Tensor) -> Iterator[torch.Tensor]:
        """The bytes of what the files call alike, in the weight's type."""
        try:
            keys = keys_to_files(self.folder)
            for key in _candidates(name, keys):
                with safe_open(self.folder / keys[key], framework="pt") as file:
                    read = file.get_tensor(key)
                if read.shape == weight.shape:
                    yield _bytes(read.to(weight.dtype))
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            _log.warning("weight %s: cannot be read again: %s", name, error)


def folder_of(model: nn.Module) -> Path | None:
    """Where a model of transformers was loaded from; None: from nowhere that is still there."""
    said: Any = getattr(model, "name_or_path", "")
    folder = Path(str(said))
    known = bool(said) and ((folder / _INDEX).is_file() or (folder / _ONE_FILE).is_file())
    return folder if known else None
