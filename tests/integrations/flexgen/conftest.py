"""A tiny OPT made on the fly, what transformers makes of it, and simulated nodes to put it on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.utils import logging as transformers_logging

from cxl_offload.integrations.flexgen import FlexGenRun, OptShape, make_opt
from cxl_offload.memory import Session
from cxl_offload.topology import Machine, Node, NodeKind, Tier

from .reference import Reference, generate_with_transformers

GIB = 1 << 30
SHAPE = OptShape(layers=3, hidden=64, heads=4, positions=64)
SEED = 4  # of 80, the one whose likeliest tokens lead the next ones by most; see test below


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices; more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder as Hugging Face writes it."""
    return make_opt(tmp_path_factory.mktemp("models") / "tiny", SHAPE, seed=SEED)


@pytest.fixture(scope="session")
def prompts() -> tuple[tuple[int, ...], ...]:
    """Eight rows of twelve tokens, two of them padded on the left."""
    rows = np.random.default_rng(0).integers(4, SHAPE.vocab, (8, 12))
    rows[1, :4] = 1
    rows[5, :7] = 1
    return tuple(tuple(int(token) for token in row) for row in rows)


@pytest.fixture(scope="session")
def reference(tiny: Path, prompts: tuple[tuple[int, ...], ...]) -> Reference:
    """Greedy tokens of transformers with the same half-precision weights.

    Where two tokens are nearly equally likely, rounding decides; the model was chosen so that
    this never happens, and it is checked here that it does not.
    """
    made = generate_with_transformers(tiny, prompts, new_tokens=8)
    assert made.smallest_lead > 0.02  # half precision resolves 0.004 at these logits
    assert len(set(made.tokens[:, 12:].ravel())) > 20
    return made


@pytest.fixture
def request_tiny(tiny: Path, prompts: tuple[tuple[int, ...], ...], tmp_path: Path) -> FlexGenRun:
    """All on the host, one batch; tests replace what they are about."""
    return FlexGenRun(
        model=str(tiny),
        token_ids=prompts,
        gen_len=8,
        gpu_batch_size=8,
        offload_dir=str(tmp_path / "offload"),
    )


def machine(capacity_bytes: tuple[int, int, int] = (8 * GIB, 8 * GIB, 4 * GIB)) -> Machine:
    """Two sockets and a CXL node."""
    kinds = (NodeKind.DRAM, NodeKind.DRAM, NodeKind.CXL)
    cpus = ((0, 1), (2, 3), ())
    return Machine(
        name="two-sockets-and-cxl",
        nodes=tuple(
            Node(id=at, kind=kinds[at], cpus=cpus[at], capacity_bytes=capacity_bytes[at])
            for at in range(3)
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
    assert session.stats().asked_bytes.current == 0
    assert session.stats().allocations.current == 0
    assert not [t.name for t in threading.enumerate() if t.name.startswith("cxl_offload-flexgen")]


@pytest.fixture
def offload_dir(tmp_path: Path) -> Iterator[Path]:
    """Where runs keep files; it must be gone after them."""
    folder = tmp_path / "offload"
    yield folder
    assert not folder.exists()
