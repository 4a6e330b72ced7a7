"""Ordinary memory that loading takes beside the tiers, where transformers puts weights together.

Each is measured in a process of its own, whose allocator gives back what is freed. It is forked off
one that has imported what all of them need, which takes longer than all that is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from benchmarks.llama_cpp_peer import write_gguf
from cxl_offload.integrations.transformers import load, loading, offload
from cxl_offload.memory import Session

from .conftest import machine
from .test_quantized import quantize_files
from .test_weights import anonymous_bytes

POLICIES = {"weights": "bind:2"}
ROOT = Path(__file__).parents[3]


def mixtral(folder: Path, layers: int = 16) -> dict[str, Any]:
    """Single precision that becomes half on the way: nothing is used as it lies in the file."""
    shape = {"vocab_size": 256, "hidden_size": 512, "intermediate_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    config = MixtralConfig(**shape, **heads, num_hidden_layers=layers)
    MixtralForCausalLM(config).save_pretrained(folder)
    return {"model": str(folder), "dtype": "bfloat16"}


def llama(layers: int) -> LlamaForCausalLM:
    shape = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024}
    return LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=layers, num_attention_heads=4))


def gguf(folder: Path, layers: int = 12) -> dict[str, Any]:
    pytest.importorskip("gguf", reason="gguf is not installed")
    write_gguf(llama(layers), folder / "model.gguf", "q8_0")
    return {"model": str(folder / "model.gguf")}


def compressed(folder: Path, layers: int = 12) -> dict[str, Any]:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    llama(layers).save_pretrained(folder)
    quantize_files("compressed-int4", folder)
    return {"model": str(folder)}


@contextlib.contextmanager
def most_beside(session: Session, found: list[int]) -> Iterator[None]:
    """The most anonymous memory besides what the session has, seen by a thread of its own."""
    done = threading.Event()

    def held() -> int:
        stats = session.stats()
        return stats.asked_bytes.current + stats.cached_bytes.current

    def watch() -> None:
        while not done.wait(0.0005):
            # A thread that waited between two readings would see memory that was given back there.
            before, process = held(), anonymous_bytes()
            found.append(process - max(before, held()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def measured(model: str, ours: bool, dtype: str = "auto", small: str = "") -> dict[str, int]:
    """The most memory beside the tiers while a model is loaded, after a small one was."""
    torch.set_num_threads(1)
    if not ours:
        setattr(loading, "made_in_place", lambda places: contextlib.nullcontext())  # noqa: B010
    load(small, POLICIES, session=Session.simulated(machine()), dtype=dtype)
    session, found = Session.simulated(machine()), list[int]()
    start = anonymous_bytes()
    with most_beside(session, found):
        made = load(model, POLICIES, session=session, dtype=dtype)
    return {
        "beside": max(found) - start,
        "placed": session.stats().asked_bytes.current,
        "largest": max(weight.nbytes for weight in made.parameters()),
    }


def plain(folder: Path, layers: int) -> dict[str, Any]:
    llama(layers).save_pretrained(folder)
    return {"model": str(folder)}


def measured_generating(model: str, small: str, doubled: bool) -> dict[str, int]:
    """The most memory beside the tiers from load() to the last token, after a small model's."""
    torch.set_num_threads(1)
    loaded_and_generated(small, Session.simulated(machine()), doubled=False)
    session, found = Session.simulated(machine()), list[int]()
    start = anonymous_bytes()
    with most_beside(session, found):
        placed = loaded_and_generated(model, session, doubled=doubled)
    return {"beside": max(found) - start, "placed": placed, "largest": 0}


def loaded_and_generated(model: str, session: Session, *, doubled: bool) -> int:
    """Bytes that were placed; ``doubled``: one layer's MLP is in ordinary memory once more."""
    made = load(model, POLICIES, session=session)
    mlp = made.model.layers[0].mlp
    again = [weight.clone() for weight in mlp.parameters() if doubled]
    with offload(made, {"kv": "bind:2"}, session=session):
        ids = torch.arange(3, 35)[None]
        made.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, pad_token_id=0)
    del again
    return session.stats().asked_bytes.peak


def serve() -> None:
    """Measures in a child of its own what each line asks; what all need is imported once."""
    for line in sys.stdin:
        child = os.fork()
        if not child:
            status = 1
            try:
                asked = json.loads(line)
                answer = measured_generating if "doubled" in asked else measured
                sys.stdout.write(f"{json.dumps(answer(**asked))}\n")
                sys.stdout.flush()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        if os.waitpid(child, 0)[1]:
            sys.exit(1)


Measure = Callable[..., dict[str, int]]


@pytest.fixture(scope="module")
def measure() -> Iterator[Measure]:
    """``measured`` in a process that nothing else was loaded in."""
    given_back = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "65536")
    with subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import serve; serve()"],
        cwd=ROOT,
        env={**os.environ, **given_back},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        asks, answers = server.stdin, server.stdout

        def ask(**options: Any) -> dict[str, int]:
            asks.write(f"{json.dumps(options)}\n")
            asks.flush()
            for line in answers:
                if line.startswith('{"beside"'):
                    found: dict[str, int] = json.loads(line)
                    return found
            raise AssertionError("the measurement failed; its error is above")

        yield ask
        asks.close()


@pytest.mark.slow(reason="loads in processes of their own, whose memory is watched")
@pytest.mark.parametrize("ours", [True, False], ids=["in place", "control"])
@pytest.mark.parametrize(("write", "tensors"), [(mixtral, 1), (gguf, 4), (compressed, 3)])
def test_weights_are_put_together_in_their_place(
    write: Callable[..., dict[str, Any]], tensors: int, ours: bool, tmp_path: Path, measure: Measure
) -> None:
    """Besides 2 % of the placement and one tensor, or what unpacking one takes.

    transformers alone takes more, the control.
    """
    (tmp_path / "small").mkdir()
    (tmp_path / "large").mkdir()
    small = write(tmp_path / "small", 1)["model"]
    found = measure(**write(tmp_path / "large"), small=small, ours=ours)
    assert found["placed"] > 90e6
    limit = 0.02 * found["placed"] + tensors * found["largest"]
    assert (found["beside"] <= limit) is ours, (found, limit)


@pytest.mark.slow(reason="loads models of some hundred MiB")
@pytest.mark.parametrize("doubled", [False, True], ids=["once", "control"])
def test_peak_from_load_to_the_last_token_is_two_percent_over_the_placement_at_most(
    doubled: bool, tmp_path: Path, measure: Measure
) -> None:
    """The control keeps 6 of 240 MiB of weights in ordinary memory once more.

    About 1 MiB is taken once, whatever the model: of half of the layers that would be most of the
    2 %, and some 100 KiB more, as another kernel takes, would fail the test.
    """
    (tmp_path / "small").mkdir()
    (tmp_path / "large").mkdir()
    small = plain(tmp_path / "small", 1)["model"]
    found = measure(**plain(tmp_path / "large", 24), small=small, doubled=doubled)
    assert found["placed"] > 240e6
    assert (found["beside"] <= 0.02 * found["placed"]) is not doubled, found
