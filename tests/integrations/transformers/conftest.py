"""Simulated nodes for caches to lie on, one thread for tiny matrices, and a checkpoint."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from cxl_offload import _C
from cxl_offload.kept import kept_path
from cxl_offload.memory import Session
from cxl_offload.topology import Machine, Node, NodeKind, Tier

from .fake_accelerator import FakeCopies, fake_accelerator
from .models import VOCAB, make

GIB = 1 << 30


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices; more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    yield
    torch.set_num_threads(before)


def machine(cxl_bytes: int = 4 * GIB) -> Machine:
    """Two sockets and a CXL node."""
    kinds = (NodeKind.DRAM, NodeKind.DRAM, NodeKind.CXL)
    sizes = (8 * GIB, 8 * GIB, cxl_bytes)
    cpus = ((0, 1), (2, 3), ())
    return Machine(
        name="two-sockets-and-cxl",
        nodes=tuple(
            Node(id=at, kind=kinds[at], cpus=cpus[at], capacity_bytes=sizes[at]) for at in range(3)
        ),
        distances={0: {0: 10, 1: 21, 2: 24}, 1: {0: 21, 1: 10, 2: 34}, 2: {0: 24, 1: 34, 2: 10}},
        tiers=(Tier("ldram", (0,)), Tier("rdram", (1,)), Tier("cxl", (2,))),
        simulated=True,
    )


@pytest.fixture
def session() -> Iterator[Session]:
    """A simulated session; whatever a test does, nothing may be left of it."""
    session = Session.simulated(machine())
    yield session
    if session.stats().asked_bytes.current:
        gc.collect()  # a failed test's frames, or a cycle of transformers' own
    assert session.stats().asked_bytes.current == 0


@pytest.fixture
def driver() -> _C.FakeDriver:
    """Of the GPU that is not there."""
    return _C.FakeDriver()


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch, driver: _C.FakeDriver) -> str:
    """The name of an accelerator whose memory is the CPU's."""
    fake_accelerator(monkeypatch, lambda session: FakeCopies(session, driver))
    return "cuda"


@pytest.fixture
def name() -> Iterator[str]:
    """Of a store that is gone after the test."""
    found = f"test-{uuid4().hex}"
    yield found
    kept_path(found).unlink(missing_ok=True)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA whose words are numbers, and prompts of different lengths; to be read only."""
    made = tmp_path_factory.mktemp("model")
    make("llama").save_pretrained(made)
    words = Tokenizer(WordLevel({str(at): at for at in range(VOCAB)}, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="1").save_pretrained(made)
    (made / "prompts.txt").write_text("40 41 42 43 44\n\n90 91\n")
    return made
