"""offload_optimizer: the states of any optimizer in tiers, also those made or loaded later."""

from __future__ import annotations

import copy
import gc
import weakref
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


def test_second_handle_is_refused_until_the_first_is_removed(session: Session) -> None:
    params, optimizer = make()
    first = offload_optimizer(optimizer, {"exp_avg": "bind:2"})
    with pytest.raises(ValueError, match="are offloaded already; call remove"):
        offload_optimizer(optimizer, {"exp_avg_sq": "bind:1"})
    first.remove()
    second = offload_optimizer(optimizer, {"exp_avg_sq": "bind:1"})
    first.remove()  # has nothing left to remove
    with pytest.raises(ValueError, match="are offloaded already"):
        offload_optimizer(optimizer, "bind:1")
    step(params, optimizer, 1)
    moved = {key[2] for key, place in second.placements().items() if place.requested is not None}
    assert moved == {"exp_avg_sq"}


def test_handle_that_is_dropped_goes_with_its_optimizer(session: Session) -> None:
    params, optimizer = make()
    offload_optimizer(optimizer, "bind:2")
    step(params, optimizer, 1)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert session.stats().asked_bytes.current == 0


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("cxxl", "'cxxl' is neither a node id nor a tier"),
        ({"exp_avg": "bind:9"}, "node 9 has no memory"),
        ({"exp_avg": "cxl", "exp_avg_sq": "interleave:0,9"}, "node 9 has no memory"),
        ("dax:dax9.0", "no such device in mode devdax; there are: none"),
    ],
)
def test_policy_that_is_none_here_is_refused_at_once(
    session: Session, policy: object, message: str
) -> None:
    params, optimizer = make()
    with pytest.raises(ValueError, match=message):
        offload_optimizer(optimizer, policy)  # type: ignore[arg-type]
    step(params, optimizer, 1)
    offload_optimizer(optimizer, "bind:2")


def test_name_of_no_state_is_refused_as_soon_as_the_states_are_known(session: Session) -> None:
    wrong = {"exp_avg": "cxl", "exp_agv": "cxl"}
    message = "keeps no state 'exp_agv'; its states are exp_avg, exp_avg_sq"
    params, optimizer = make(CPUAdam)
    with pytest.raises(ValueError, match=message):
        offload_optimizer(optimizer, wrong)
    params, optimizer = make()
    offload_optimizer(optimizer, wrong)
    with pytest.raises(ValueError, match=message):
        step(params, optimizer, 1)
    _, other = make()
    other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        offload_optimizer(other, wrong)


def test_compiled_steps_are_followed_without_a_word(
    session: Session, recwarn: pytest.WarningsRecorder
) -> None:
    torch.compiler.reset()
    params, optimizer = make()
    handle = offload_optimizer(optimizer, "bind:2")
    compiled = torch.compile(optimizer.step, backend="eager")
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        compiled()
    torch.compiler.reset()
    assert {tuple(place.granted) for place in handle.placements().values()} == {(2,)}
    assert not [w for w in recwarn if "Dynamo does not know" in str(w.message)]
