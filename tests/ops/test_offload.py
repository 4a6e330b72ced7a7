"""offload_optimizer: the states of any optimizer in tiers, also those made or loaded later."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

import cxl_offload
from cxl_offload.memory import Session
from cxl_offload.ops.adam import CPUAdam
from cxl_offload.ops.offload import offload_optimizer

from ..memory.machines import simulated_memory


@pytest.fixture
def session() -> Iterator[Session]:
    """Two DRAM nodes and a CXL node, simulated."""
    session = simulated_memory()
    with cxl_offload.use(session):
        yield session


def make(
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((100, 70), (5000,), (3,))]
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    return params, kind(params, lr=0.1, **options)  # type: ignore[call-arg]


def step(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, count: int) -> None:
    for index in range(count):
        for param in params:
            param.grad = torch.full_like(param, 0.1 * (index + 1))
        optimizer.step()


KINDS = [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, CPUAdam]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("early", [True, False], ids=["before-first-step", "after-it"])
def test_states_are_on_the_node_and_steps_do_not_change(
    session: Session, kind: type[torch.optim.Optimizer], early: bool
) -> None:
    plain_params, plain = make(kind)
    step(plain_params, plain, 3)
    params, optimizer = make(kind)
    if not early:
        step(params, optimizer, 1)
        for group in optimizer.param_groups:
            group["lr"] = 0.1
    handle = offload_optimizer(optimizer, "bind:2")
    for index in range(0 if early else 1, 3):
        for param in params:
            param.grad = torch.full_like(param, 0.1 * (index + 1))
        optimizer.step()
    placements = handle.placements()
    assert len(placements) >= len(params)
    assert {tuple(placement.granted) for placement in placements.values()} == {(2,)}
    for param, other in zip(params, plain_params, strict=True):
        assert torch.equal(param, other)


def test_each_state_goes_to_its_own_placement(session: Session) -> None:
    params, optimizer = make()
    handle = offload_optimizer(optimizer, {"exp_avg": "bind:2"})
    step(params, optimizer, 1)
    for (_, _, name), placement in handle.placements().items():
        assert (placement.requested is not None) == (name == "exp_avg")


def test_loaded_states_move_again_and_moved_ones_stay(session: Session) -> None:
    params, optimizer = make()
    handle = offload_optimizer(optimizer, "bind:1")
    step(params, optimizer, 2)
    addresses = [state["exp_avg"].data_ptr() for state in optimizer.state.values()]
    step(params, optimizer, 1)
    assert [s["exp_avg"].data_ptr() for s in optimizer.state.values()] == addresses
    assert handle.sweep() == 0
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert {tuple(p.granted) for p in handle.placements().values()} == {(1,)}
    for key, state in optimizer.state_dict()["state"].items():
        assert torch.equal(state["exp_avg"], saved["state"][key]["exp_avg"])


def test_removed_handle_leaves_later_states_alone(session: Session) -> None:
    params, optimizer = make()
    handle = offload_optimizer(optimizer, "bind:2")
    handle.remove()
    step(params, optimizer, 1)
    assert all(placement.requested is None for placement in handle.placements().values())


def test_full_node_is_an_error_and_the_states_stay(session: Session) -> None:
    params = [torch.nn.Parameter(torch.zeros(1 << 20))]
    optimizer = torch.optim.AdamW(params, lr=0.1)
    small = simulated_memory((1 << 30, 1 << 30, 1 << 20))
    step(params, optimizer, 1)
    before = optimizer.state[params[0]]["exp_avg"].clone()
    with pytest.raises(MemoryError):
        offload_optimizer(optimizer, "bind:2", session=small)
    assert torch.equal(optimizer.state[params[0]]["exp_avg"], before)


def test_states_on_another_device_are_refused(session: Session) -> None:
    params = [torch.nn.Parameter(torch.zeros(4, device="meta"))]
    optimizer = torch.optim.AdamW(params)
    optimizer.state[params[0]]["exp_avg"] = torch.zeros(4, device="meta")
    with pytest.raises(ValueError, match="is on meta"):
        offload_optimizer(optimizer, "bind:0")
