"""Weights are read from their file, and not through the mapping, where memory still is the file."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import mmap
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

import cxl_offload
from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import load, offload, weight_reads
from cxl_offload.memory import Session
from cxl_offload.objects.load_parts import AT_ONCE, FAULT_IN, READING, LoadClock
from cxl_offload.objects.mapped_ranges import cached_bytes
from cxl_offload.topology import load_machine
from cxl_offload.transfer import file_reads
from cxl_offload.transfer.file_reads import FilePart, FileReads

PATIENCE_S = 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1100,
        hidden_size=256,
        intermediate_size=1100,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[FilePart]:
    """Every part of a file that was read."""
    found: list[FilePart] = []

    start = FileReads.start

    def counted(reads: FileReads, part: FilePart, **others: Any) -> None:
        found.append(part)
        start(reads, part, **others)

    monkeypatch.setattr(FileReads, "start", counted)
    return found


def large_bytes(model: PreTrainedModel) -> int:
    sizes = [weight.nbytes for weight in model.parameters()]
    return sum(nbytes for nbytes in sizes if nbytes >= weight_reads.LEAST_BYTES)


def same_weights(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_large_weights_of_a_checkpoint_are_read_from_its_file(
    folder: Path, parts: list[FilePart]
) -> None:
    stock = AutoModelForCausalLM.from_pretrained(folder)
    model = load(folder, {"weights": "bind:0"})
    assert same_weights(model, stock)
    assert sum(part.nbytes for part in parts) == large_bytes(stock) > 8 << 20
    assert {part.path for part in parts} == {str(folder / "model.safetensors")}


def test_weights_in_another_dtype_than_the_file_are_copied(
    folder: Path, parts: list[FilePart]
) -> None:
    model = load(folder, {"weights": "bind:0"}, dtype=torch.bfloat16)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert same_weights(model, stock)
    assert not parts


def test_weight_that_was_trained_since_is_moved_as_it_is(
    folder: Path, parts: list[FilePart]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    changed = model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        changed[7, 3] += 1
    before = [weight.clone() for weight in model.parameters()]
    with offload(model, {"weights": "bind:0"}):
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert sum(part.nbytes for part in parts) < large_bytes(model)


@pytest.mark.parametrize("what", ["view", "turned", "stripes"])
def test_part_of_a_mapped_weight_has_the_elements_of_the_part(
    tmp_path: Path, what: str, parts: list[FilePart]
) -> None:
    save_file({"a": torch.arange(3 << 19, dtype=torch.float32).view(512, -1)}, tmp_path / "f")
    with safe_open(tmp_path / "f", framework="pt") as file:
        whole = file.get_tensor("a")
    part = {"view": whole[100:], "turned": whole.T, "stripes": whole[::2]}[what]
    placed = cxl_offload.empty(*part.shape, dtype=part.dtype)
    with weight_reads.reads_of_weights() as reads:
        weight_reads.start_filling(reads, placed, part)
        reads.wait()
    assert torch.equal(placed, part)
    assert len(parts) == (what == "view")


def drop_from_cache(folder: Path) -> Path:
    [path] = folder.glob("*.safetensors")
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def opened() -> tuple[set[str], int]:
    """Files of weights that are open, and threads."""
    gc.collect()
    found = set[str]()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return {name for name in found if name.endswith(".safetensors")}, threading.active_count()


def test_memory_of_the_next_weights_is_made_while_one_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocations, fill, allocate = threading.Semaphore(0), file_reads._Reader.fill, Session.allocate
    reads = itertools.count()

    def late(reader: file_reads._Reader, *piece: int) -> int:
        if next(reads) == 0:
            for _ in range(3):
                assert allocations.acquire(timeout=PATIENCE_S), "nothing is made meanwhile"
        return fill(reader, *piece)

    def counted(session: Session, *args: Any, **options: Any) -> Any:
        allocations.release()
        return allocate(session, *args, **options)

    monkeypatch.setattr(file_reads._Reader, "fill", late)
    monkeypatch.setattr(Session, "allocate", counted)
    with LoadClock() as clock:
        model = load(folder, {"weights": "bind:0"})
    parts = {part.name: part for part in clock.parts}
    assert parts[AT_ONCE].seconds > 0
    assert parts[READING].nbytes == parts[FAULT_IN].nbytes
    monkeypatch.undo()
    assert same_weights(model, AutoModelForCausalLM.from_pretrained(folder))


def test_file_that_cannot_be_read_ends_the_load_and_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, calls = opened(), itertools.count()

    def fails(reader: file_reads._Reader, *piece: int) -> int:
        if next(calls):
            raise OSError(errno.EIO, "Input/output error", "the file")
        return piece[-1]

    monkeypatch.setattr(file_reads._Reader, "fill", fails)
    session = Session.linux()
    with pytest.raises(OSError, match=r"Input/output error: 'the file'"):
        load(folder, {"weights": "bind:0"}, session=session)
    assert opened() == before
    assert session.stats().asked_bytes.current == 0


def test_load_that_is_interrupted_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, calls, allocate = opened(), itertools.count(), Session.allocate

    def interrupted(session: Session, *args: Any, **options: Any) -> Any:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return allocate(session, *args, **options)

    monkeypatch.setattr(Session, "allocate", interrupted)
    session = Session.linux()
    with pytest.raises(KeyboardInterrupt):
        load(folder, {"weights": "bind:0"}, session=session)
    assert opened() == before
    assert session.stats().asked_bytes.current == 0


def test_load_from_the_drive_leaves_the_page_cache_as_it_was(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    small = sum(weight.nbytes < weight_reads.LEAST_BYTES for weight in model.parameters())
    large = sum(weight.nbytes >= weight_reads.LEAST_BYTES for weight in model.parameters())
    small_bytes = sum(weight.nbytes for weight in model.parameters()) - large_bytes(model)
    del model
    gc.collect()
    path = drop_from_cache(folder)
    if cached_bytes(path):
        pytest.skip("this file system keeps its files in memory")
    loaded = load(folder, {"weights": "bind:0"})
    pages = 4 + 2 * small + large  # the header, and where weights begin and end
    assert 0 < cached_bytes(path) <= small_bytes + pages * mmap.PAGESIZE
    assert same_weights(loaded, AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize("broken", [b"", b"\xff" * 8, b"\2" + bytes(7) + b"[]", b"\2" + bytes(7)])
def test_pages_of_a_broken_file_are_left_to_who_loads_it(tmp_path: Path, broken: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(broken)
    weight_reads.ask_for_first_pages(tmp_path)


def test_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    asking = threading.Thread(
        target=weight_reads.ask_for_first_pages, args=(tmp_path,), daemon=True
    )
    asking.start()
    asking.join(PATIENCE_S)
    assert not asking.is_alive()


def test_stacked_experts_are_read_from_their_file(tmp_path: Path, parts: list[FilePart]) -> None:
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=4,
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    model = load(tmp_path, {"weights": "bind:0"})
    assert same_weights(model, AutoModelForCausalLM.from_pretrained(tmp_path))
    experts = 3 * 4 * 512 * 1024 * 4
    assert sum(part.nbytes for part in parts) >= experts


def said_by_child(folder: Path) -> str:
    """What a load in a forked child says; empty: it loaded. A load that hangs ends the child."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(PATIENCE_S)
            load(folder, {"weights": "bind:0"}, session=Session.simulated(load_machine("spr-1")))
        except ConfigError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    return said


def test_child_forked_amid_a_load_of_another_thread_is_refused_and_does_not_hang(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, goes_on, start = threading.Event(), threading.Event(), FileReads.start

    def waiting(reads: FileReads, *args: Any, **options: Any) -> None:
        reached.set()
        assert goes_on.wait(PATIENCE_S)
        start(reads, *args, **options)

    monkeypatch.setattr(FileReads, "start", waiting)
    thread = threading.Thread(target=load, args=(folder, {"weights": "bind:0"}))
    thread.start()
    assert reached.wait(PATIENCE_S)
    try:
        assert "was forked while another thread loaded a model" in said_by_child(folder)
    finally:
        goes_on.set()
        thread.join()
    assert not said_by_child(folder)
