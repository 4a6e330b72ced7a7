"""What a model on disk is, as facts that a store of its KV blocks is compared by.

Small files (configuration, tokenizer, code) count by all of their bytes. Weights are too large to
read at every start: a file of weights counts by its size, by the times of its last change (which
the kernel sets whenever contents or name change, and which nobody can set back), and by samples of
its bytes. In a cache of the Hugging Face hub files are links whose targets are named by their
contents; that name counts too.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_SMALL_BYTES = 64 << 20
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_TOKENIZER = ("token", "vocab", "merges", "special", "added", "spiece", "chat_template")


def model_facts(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Digests of the weights, the tokenizer and the other files of a model.

    Raises
    ------
    ValueError
        The folder has no file of weights.
    OSError
        A file cannot be read.
    """
    parts = {"weights": hashlib.sha256(), "tokenizer": hashlib.sha256(), "files": hashlib.sha256()}
    count = 0
    for path in sorted(Path(folder).rglob("*")):
        if not path.is_file() or path.relative_to(folder).parts[0].startswith("."):
            continue
        name = path.relative_to(folder).as_posix()
        state = path.stat()
        if path.suffix in _WEIGHTS or state.st_size > _SMALL_BYTES:
            count += path.suffix in _WEIGHTS
            part, contents = "weights", _samples(path, state)
        else:
            is_tokenizer = any(word in name.lower() for word in _TOKENIZER)
            part = "tokenizer" if is_tokenizer else "files"
            contents = hashlib.sha256(path.read_bytes()).digest()
        line = f"{name} {state.st_size} ".encode() + contents
        parts[part].update(hashlib.sha256(line).digest())
    if not count:
        raise ValueError(f"{folder} has no weights ({', '.join(_WEIGHTS)})")
    return {name: part.hexdigest()[:32] for name, part in parts.items()}


def _samples(path: Path, state: os.stat_result) -> bytes:
    found = hashlib.sha256()
    found.update(f"{path.resolve().name} {state.st_mtime_ns} {state.st_ctime_ns}".encode())
    step = max(_SAMPLE_BYTES, state.st_size // _SAMPLES)
    with path.open("rb") as file:
        for at in [*range(0, state.st_size, step), max(0, state.st_size - _SAMPLE_BYTES)]:
            file.seek(at)
            found.update(file.read(_SAMPLE_BYTES))
    return found.digest()
