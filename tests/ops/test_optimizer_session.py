"""Optimizers with a session of their own: what allocates their states, and their copies' states."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import cxl_offload
from cxl_offload.ops.adagrad import CPUAdagrad
from cxl_offload.ops.adam import CPUAdam
from cxl_offload.ops.lion import CPULion

from ..memory.machines import simulated_memory
from .test_optimizers import assert_same, parameters, train

EACH = pytest.mark.parametrize("kind", [CPUAdam, CPULion, CPUAdagrad])


def held(optimizer: Any, session: cxl_offload.Session) -> list[bool]:
    """Whether each state with bytes is memory of the session."""
    states = [state for p in optimizer.state for state in optimizer.state[p].values()]
    kept = [s for s in states if isinstance(s, torch.Tensor) and s.ndim and s.numel()]
    assert kept
    return [session.find(state.data_ptr()) is not None for state in kept]


@EACH
@pytest.mark.parametrize("overlap", [False, True])
def test_states_are_of_the_session_given_not_of_the_current_one(kind: Any, overlap: bool) -> None:
    own, current = simulated_memory(), simulated_memory()
    with cxl_offload.use(current):
        params = parameters()
        optimizer = kind(params, policy="bind:2", session=own, overlap=overlap)
        train(optimizer, params, range(2))
        plain = kind(parameters(), policy="bind:2")
        train(plain, plain.param_groups[0]["params"], range(2))
    assert set(held(optimizer, own)) == {True}
    assert set(held(optimizer, current)) == {False}
    assert set(held(plain, current)) == {True}, "without one, the current session allocates"
    assert_same(params, plain.param_groups[0]["params"])


@EACH
def test_states_that_are_loaded_are_of_the_session_given(kind: Any) -> None:
    own = simulated_memory()
    params, source = parameters(), kind(parameters())
    train(source, source.param_groups[0]["params"], range(2))
    optimizer = kind(params, policy="bind:2", session=own)
    optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
    assert set(held(optimizer, own)) == {True}


def test_copy_of_an_optimizer_shares_its_session_and_a_pickle_takes_the_current_one() -> None:
    own, current = simulated_memory(), simulated_memory()
    params = parameters()
    optimizer = CPUAdam(params, policy="bind:2", session=own)
    train(optimizer, params, range(2))
    _, copied = copy.deepcopy((params, optimizer))
    assert copied.session is own
    assert set(held(copied, own)) == {True}
    with cxl_offload.use(current):
        _, read = pickle.loads(pickle.dumps((params, optimizer)))
    assert read.session is None
    assert set(held(read, current)) == {True}
    assert optimizer.session is own


def test_policy_that_only_the_other_session_knows_is_refused() -> None:
    lacks_it = cxl_offload.Session.simulated(cxl_offload.load_machine("gh200"))
    with cxl_offload.use(simulated_memory()):
        CPUAdam(parameters(), policy="bind:2")
        with pytest.raises(ValueError, match="node 2"):
            CPUAdam(parameters(), policy="bind:2", session=lacks_it)
    with pytest.raises(TypeError, match=r"CPULion: session is a str; give a session"):
        CPULion(parameters(), session="linux")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="session in a group does nothing"):
        CPUAdam([{"params": parameters(), "session": simulated_memory()}])
