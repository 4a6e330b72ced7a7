"""Hugging Face OPT files into FlexGen's: a numpy file a parameter, in half precision."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from flexgen.opt_config import OptConfig
from safetensors import SafetensorError, safe_open

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.flexgen.model import (
    ModelSource,
    check_np_folder,
    weight_shapes,
)
from cxl_offload.profile.schedule import Progress
from cxl_offload.units import format_bytes

_Tensors = dict[str, Callable[[], torch.Tensor]]
_ORIGIN = "cxl_offload_origin.json"
_DAMAGE = (SafetensorError, RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError)


def weights_folder(source: ModelSource, scratch: Path, *, progress: Progress | None = None) -> Path:
    """FlexGen's weight folder of the model, converted first when it is a checkpoint.

    Parameters
    ----------
    source
        The model.
    scratch
        Folder of this run, for a conversion that is not kept.
    progress
        Told of every parameter converted.

    Raises
    ------
    ConfigError
        The checkpoint is incomplete or damaged, or the cache belongs to another one.
    OSError
        The disk is too full.
    """
    if source.kind != "checkpoint":
        return source.folder
    target = source.cache or scratch / f"{source.config.name}-np"
    origin = _origin(source.folder)
    if target.exists():
        _check_origin(target, origin)
        check_np_folder(target, source.config)
        return target
    convert_checkpoint(source.folder, source.config, target, progress=progress)
    return target


def convert_checkpoint(
    folder: Path, config: OptConfig, target: Path, *, progress: Progress | None = None
) -> None:
    """Write ``target`` from the checkpoint in ``folder``; on failure nothing is left.

    Biases and layer norms that the checkpoint leaves out (``enable_bias`` or
    ``layer_norm_elementwise_affine`` false) are written as zeros and ones, which is what they mean.

    Raises
    ------
    ConfigError
        A tensor is missing, has another shape, or does not fit half precision.
    OSError
        The disk is too full.
    """
    shapes = weight_shapes(config)
    target.parent.mkdir(parents=True, exist_ok=True)
    need = sum(2 * int(np.prod(shape)) + 128 for shape in shapes.values())
    free = shutil.disk_usage(target.parent).free
    if need > free:
        raise OSError(
            f"convert {folder}: {format_bytes(need)} of weights, {target.parent} has "
            f"{format_bytes(free)} free; give --path on a larger disk"
        )
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        with _open_tensors(folder) as tensors:
            for at, (name, shape) in enumerate(shapes.items()):
                array = _half(folder, name, shape, tensors)
                with (unfinished / name).open("wb") as handle:
                    np.save(handle, array)
                if progress is not None:
                    progress("convert", at + 1, len(shapes))
        (unfinished / _ORIGIN).write_text(json.dumps(_origin(folder)), encoding="utf-8")
        shutil.copyfile(folder / "config.json", unfinished / "config.json")
        os.rename(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _half(
    folder: Path, name: str, shape: tuple[int, ...], tensors: _Tensors
) -> np.ndarray[tuple[int, ...], np.dtype[np.float16]]:
    read = tensors.get(name)
    if read is None:
        if not name.endswith(("bias", "layer_norm.weight")):
            raise ConfigError(f"{folder}: no tensor {name}; the checkpoint is not complete")
        fill = np.ones if name.endswith("weight") else np.zeros
        return fill(shape, np.float16)
    try:
        tensor = read()
    except _DAMAGE as error:
        raise ConfigError(f"{folder}: {name} cannot be read ({_first_line(error)})") from None
    if tuple(tensor.shape) != shape:
        raise ConfigError(f"{folder}: {name} is {tuple(tensor.shape)}, config.json says {shape}")
    half = tensor.to(torch.float16)
    if not bool(torch.isfinite(half).all()):
        raise ConfigError(f"{folder}: {name} has values that half precision cannot hold")
    return np.asarray(half.contiguous().numpy(), dtype=np.float16)


@contextmanager
def _open_tensors(folder: Path) -> Iterator[_Tensors]:
    """Every tensor of the checkpoint under FlexGen's name, files kept open meanwhile."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise ConfigError(f"{folder}: no *.safetensors and no pytorch_model*.bin in it")
    tensors: _Tensors = {}
    with ExitStack() as opened:
        for file in files:
            try:
                found = _open_file(file, opened)
            except _DAMAGE as error:
                raise ConfigError(f"{file}: damaged or truncated ({_first_line(error)})") from None
            tensors.update({_flexgen_name(name): read for name, read in found.items()})
        yield tensors


def _open_file(file: Path, opened: ExitStack) -> _Tensors:
    if file.suffix == ".safetensors":
        handle = opened.enter_context(safe_open(str(file), framework="pt"))
        names = list(handle.keys())
        return {name: partial(handle.get_tensor, name) for name in names}
    state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return {name: tensor.detach for name, tensor in state.items()}


def _flexgen_name(name: str) -> str:
    name = name.removeprefix("model.")
    return name.replace("decoder.final_layer_norm", "decoder.layer_norm")


def _origin(folder: Path) -> dict[str, list[int]]:
    """Size and time of change of the checkpoint's files: which checkpoint a cache came from."""
    names = ("config.json", "*.safetensors", "pytorch_model*.bin")
    files = sorted(file for name in names for file in folder.glob(name))
    return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


def _check_origin(target: Path, origin: dict[str, list[int]]) -> None:
    try:
        kept = json.loads((target / _ORIGIN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        kept = None
    if kept != origin:
        raise ConfigError(
            f"{target}: holds the weights of another checkpoint; remove it or give another --path"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
