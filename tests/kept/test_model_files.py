"""Whatever changes about a model on disk changes its facts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cxl_offload.kept import model_facts


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"layers": 2}')
    (folder / "tokenizer.json").write_text('{"vocab": {}}')
    (folder / "model.safetensors").write_bytes(bytes(1 << 20))
    return folder


def change_middle(folder: Path) -> None:
    """One byte that no sample sees, and the old time of change."""
    path = folder / "model.safetensors"
    state = path.stat()
    with path.open("r+b") as file:
        file.seek((1 << 20) // 64 * 20 + 5000)
        file.write(b"x")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def other_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"x" * (1 << 20))


def more_weights(folder: Path) -> None:
    (folder / "more.safetensors").write_bytes(b"x")


def other_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "renamed.safetensors")


@pytest.mark.parametrize("change", [change_middle, other_weights, more_weights, other_name])
def test_changed_weights_are_seen(change: Callable[[Path], None], model: Path) -> None:
    before = model_facts(model)
    assert model_facts(model) == before
    change(model)
    after = model_facts(model)
    assert {name for name in before if before[name] != after[name]} == {"weights"}


@pytest.mark.parametrize(
    ("file", "name"),
    [("tokenizer.json", "tokenizer"), ("config.json", "files"), ("new/modeling.py", "files")],
)
def test_changed_files_are_seen(file: str, name: str, model: Path) -> None:
    before = model_facts(model)
    (model / file).parent.mkdir(exist_ok=True)
    (model / file).write_text('{"changed": 1}')
    after = model_facts(model)
    assert {key for key in before if before[key] != after[key]} == {name}


def test_files_of_the_hub_count_by_the_names_of_their_blobs(model: Path) -> None:
    blobs = model.parent / "blobs"
    blobs.mkdir()
    (model / "model.safetensors").rename(blobs / "aaaa")
    (model / "model.safetensors").symlink_to(blobs / "aaaa")
    (model / ".cache").mkdir()
    before = model_facts(model)
    (model / ".cache" / "lock").write_text("x")
    assert model_facts(model) == before
    (blobs / "aaaa").rename(blobs / "bbbb")
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(blobs / "bbbb")
    assert model_facts(model) != before


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no weights"):
        model_facts(tmp_path)
