"""Asynchronous checkpoints staged in a tier, by torch's own saver."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cxl_offload import Session, load_machine
from cxl_offload.ops.checkpoint_stager import TierStager


@pytest.fixture
def session() -> Session:
    return Session.simulated(load_machine("epyc9354-cxl-a"))


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(3, 64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def test_save_is_of_the_moment_and_resumes_bit_for_bit(
    gloo: None, tmp_path: Path, session: Session
) -> None:
    model, optimizer = trained()
    saved = {name: weight.clone() for name, weight in model.state_dict().items()}
    stager = TierStager("bind:2", session=session)
    made = dcp.async_save(
        state_of(model, optimizer), checkpoint_id=tmp_path / "saved", async_stager=stager
    )
    step(model, optimizer)  # training goes on while it is written
    made.result()
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    other, its_optimizer = trained()
    step(other, its_optimizer)
    found = state_of(other, its_optimizer)
    dcp.load(found, checkpoint_id=tmp_path / "saved")
    other.load_state_dict(found["model"])
    its_optimizer.load_state_dict(found["optimizer"])
    assert found["epoch"] == 3
    assert all(torch.equal(other.state_dict()[name], saved[name]) for name in saved)
    step(other, its_optimizer)
    assert all(torch.equal(other.state_dict()[name], expected[name]) for name in expected)
    del made, found
    gc.collect()
    assert stager.held_bytes == session.stats().asked_bytes.current == 0


def test_copies_lie_in_the_tier_and_their_memory_is_used_again(session: Session) -> None:
    state = {"a": torch.randn(512, 512), "deep": [{"b": torch.randn(300, 1000).half().t()}]}
    state["alias"] = state["a"]
    stager = TierStager("bind:2", session=session)
    for _ in range(3):
        made = stager.stage(state)
        for one, two in ((made["a"], state["a"]), (made["deep"][0]["b"], state["deep"][0]["b"])):
            assert torch.equal(one, two)
            assert set(session.bytes_per_node(one.data_ptr(), one.nbytes)) == {2}
        assert made["alias"] is made["a"]
        assert stager.held_bytes == 512 * 512 * 4 + 300 * 1000 * 2
        del made, one
    assert stager.held_bytes == 0
    assert session.stats().mapped_bytes.total < 2 * (512 * 512 * 4 + 300 * 1000 * 2)


def test_copies_of_two_saves_are_held_to_the_limit(session: Session) -> None:
    state = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
    stager = TierStager("bind:2", limit_bytes=12_000, session=session)
    first = stager.stage(state)
    with pytest.raises(MemoryError, match="wait for the save before"):
        stager.stage(state)
    assert stager.held_bytes == 8000
    del first
    assert stager.stage(state)["a"].shape == (1000,)


def test_distributed_tensors_keep_their_places(gloo: None, session: Session) -> None:
    mesh = init_device_mesh("cpu", (1,))
    whole = torch.randn(64, 32)
    made = TierStager("bind:2", session=session).stage(
        {"weight": distribute_tensor(whole.clone(), mesh, [Shard(0)])}
    )["weight"]
    assert isinstance(made, DTensor)
    assert made.placements == (Shard(0),)
    assert torch.equal(made.full_tensor(), whole)
    local = made.to_local()
    assert set(session.bytes_per_node(local.data_ptr(), local.nbytes)) == {2}


def test_stages_of_several_threads_count_right(session: Session) -> None:
    stager = TierStager("bind:2", session=session)
    state = {"a": torch.zeros(5000)}

    def many() -> None:
        for _ in range(50):
            stager.stage(state)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stager.held_bytes == 0


def test_what_cannot_be_staged_is_refused_and_leaves_nothing(session: Session) -> None:
    stager = TierStager("bind:2", session=session)
    plain = torch.zeros(100)

    class Odd(torch.Tensor):
        """Its bytes may mean anything."""

    for odd in (plain.as_subclass(Odd), torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        with pytest.raises(TypeError, match="own stager"):
            stager.stage({"plain": plain, "odd": odd})
    assert stager.held_bytes == session.stats().asked_bytes.current == 0
    with pytest.raises(TypeError, match="its default is THREAD"):
        pickle.dumps(stager.stage({"plain": plain}))


def test_state_that_contains_itself_is_refused_and_leaves_nothing(session: Session) -> None:
    stager = TierStager("cxl", session=session)
    state: dict[str, Any] = {"first": torch.ones(8), "inner": [torch.ones(8), {}]}
    state["inner"][1]["back"] = state["inner"]
    with pytest.raises(ValueError, match="contains itself"):
        stager.stage(state)
    state["inner"][1]["back"] = state
    with pytest.raises(ValueError, match="contains itself"):
        stager.stage(state)
    assert stager.held_bytes == 0


def test_state_that_is_nested_too_deeply_is_refused(session: Session) -> None:
    stager, state = TierStager("cxl", session=session), {}
    inner: dict[str, Any] = state
    for _ in range(5_000):
        inner["tensor"], inner["next"] = torch.ones(1), {}
        inner = inner["next"]
    with pytest.raises(ValueError, match="of fewer levels"):
        stager.stage(state)
    assert stager.held_bytes == 0


def test_wrong_limits_and_policies_are_refused_before_a_save(session: Session) -> None:
    with pytest.raises(ValueError, match="limit_bytes is 0"):
        TierStager("bind:2", limit_bytes=0, session=session)
    with pytest.raises(ValueError, match="7"):
        TierStager("bind:7", session=session)


def test_state_without_its_memory_is_refused_and_nothing_stays_held(session: Session) -> None:
    stager = TierStager("cxl", session=session)
    gone = torch.ones(1000)
    gone.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="resized"):
        stager.stage({"x": gone})
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    quantised = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    for odd in (nested, quantised):
        with pytest.raises(TypeError, match="torch's own stager"):
            stager.stage({"x": odd})
    for state in ([torch.ones(1)], torch.ones(1), None):
        with pytest.raises(TypeError, match="state dict"):
            stager.stage(state)  # type: ignore[arg-type]
    assert stager.held_bytes == 0


@pytest.mark.parametrize("limit", ["1GiB", 1.5, float("nan")])
def test_limit_that_is_no_whole_number_is_refused(session: Session, limit: Any) -> None:
    with pytest.raises(TypeError, match="limit_bytes"):
        TierStager("cxl", limit_bytes=limit, session=session)
