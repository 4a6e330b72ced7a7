"""Arguments of a wrong type are refused by name, in one short line, before the core sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import cxl_offload
from cxl_offload.memory import (
    Session,
    SharedRegion,
    Weighted,
    survive_memory_errors,
    written_anew,
)
from cxl_offload.transfer import CopyEngine, HostCopier

from .machines import simulated_memory

LONG = "x" * 5000
NO_INTEGERS = ["a", None, 2.5, b"x", [], {}, object(), float("nan"), LONG]
NO_POLICIES = [1, None, b"bind:0", ["bind:0"], 2.5, "", "bind:" + "9" * 5000, LONG, object()]


@pytest.fixture
def session() -> Iterator[Session]:
    session = simulated_memory()
    with cxl_offload.use(session):
        yield session
    assert session.stats().asked_bytes.current == 0


def refusal(call: Callable[[], Any]) -> str:
    """What a call says that must fail."""
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


@pytest.mark.parametrize("value", NO_INTEGERS, ids=lambda value: repr(value)[:12])
def test_what_is_no_integer_is_named(session: Session, value: Any) -> None:
    assert "nbytes" in refusal(lambda: session.allocate(value, "bind:0"))
    assert "nbytes" in refusal(lambda: SharedRegion("wrong", value, session=session))
    assert "shape" in refusal(lambda: cxl_offload.empty(4, value))
    assert "shape" in refusal(lambda: cxl_offload.zeros((4, value)))
    assert "chunk_bytes" in refusal(lambda: CopyEngine(session, chunk_bytes=value))
    assert "limit_bytes" in refusal(lambda: CopyEngine(session, limit_bytes=value))
    assert "cpus" in refusal(lambda: HostCopier(cpus=[0, value]))


def test_integers_of_numpy_and_torch_are_integers(session: Session) -> None:
    assert session.allocate(np.int64(4096), "bind:0").nbytes == 4096  # type: ignore[arg-type]
    sizes = (torch.Size([2, 3]), np.array([2, 3]), [np.int32(2), torch.tensor(3)], (True + 1, 3))
    for size in sizes:
        assert cxl_offload.zeros(size, policy="bind:0").shape == (2, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", NO_POLICIES, ids=lambda value: repr(value)[:12])
def test_what_is_no_policy_is_quoted_briefly(session: Session, value: Any) -> None:
    refusal(lambda: session.allocate(4096, value))
    refusal(lambda: Weighted(value))


@pytest.mark.parametrize(
    "name", ["", LONG, "../x", "a/b", "a\0b", "a\nb", "\U0001f600" * 60, 7, None]
)
def test_names_that_no_file_of_a_region_can_have_are_refused(session: Session, name: Any) -> None:
    assert "name" in refusal(lambda: SharedRegion(name, 4096, session=session))


def test_a_switch_is_read_as_python_reads_it(session: Session) -> None:
    for strict in (0, [], "yes", 1.5):
        assert session.allocate(4096, "bind:0", strict=strict).nbytes == 4096  # type: ignore[arg-type]


@pytest.mark.parametrize("cpus", [[-1], [10**9], [10**30]])
def test_cpus_that_a_process_may_not_use_are_refused_also_without_threads(cpus: list[int]) -> None:
    assert "CPU" in refusal(lambda: HostCopier(cpus=cpus))


@pytest.mark.parametrize("sample_s", [-1.0, 0.0, float("nan"), float("inf"), 1e9])
def test_samples_without_an_end_are_refused(sample_s: float) -> None:
    data = torch.zeros(8)
    copier, address = HostCopier(), data.data_ptr()
    message = refusal(
        lambda: copier.time(
            target=address, source=address + 16, room_bytes=16, nbytes=4, ways=[None], rounds=1,
            sample_s=sample_s,
        )
    )  # fmt: skip
    assert "samples" in message


def test_targets_whose_elements_overlap_are_refused() -> None:
    windows = torch.arange(12.0).unfold(0, 4, 1)
    assert "share memory" in refusal(
        lambda: HostCopier().copy_strided(target=windows, source=torch.ones(9, 4))
    )
    apart = torch.zeros(12).unfold(0, 4, 4)
    HostCopier().copy_strided(target=apart, source=torch.ones(3, 4))
    assert apart.eq(1).all()


@pytest.mark.parametrize("value", [*NO_INTEGERS, -1, 2**70], ids=lambda value: repr(value)[:12])
def test_bytes_that_cannot_be_written_anew_are_named(value: Any) -> None:
    assert "address" in refusal(lambda: written_anew(value, 1))
    assert "nbytes" in refusal(lambda: written_anew(4096, value))
    assert "nbytes" in refusal(lambda: written_anew(2**64 - 1, 10))


def test_any_switch_says_whether_to_interrupt() -> None:
    survive_memory_errors(interrupt="no").stop()  # type: ignore[arg-type]
