"""Which threads, on which CPUs, for which node's bytes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from cxl_offload import _C
from cxl_offload.ops import attention
from cxl_offload.ops.adam import CPUAdam, adam_step
from cxl_offload.ops.threads import groups_for, kernel_for, team_for

from ..memory.machines import simulated_machine
from ..placement.child import run_in_child

MACHINE = simulated_machine()  # CPUs 0, 1 on node 0; 2, 3 on node 1; none on node 2, nearer to 0
ALL = frozenset(range(4))


def test_default_takes_every_allowed_cpu_of_every_node() -> None:
    assert groups_for(None, MACHINE, ALL) == ((0, 2, (0, 1)), (1, 2, (2, 3)))
    assert groups_for(None, MACHINE, frozenset({1, 2, 3})) == ((0, 1, (1,)), (1, 2, (2, 3)))


def test_one_node_needs_no_binding() -> None:
    assert groups_for(None, MACHINE, frozenset({2, 3})) == ((-1, 2, ()),)
    assert groups_for(5, MACHINE, frozenset({0, 1})) == ((-1, 5, ()),)


def test_number_is_spread_over_nodes_by_their_cpus() -> None:
    assert groups_for(1, MACHINE, ALL) == ((0, 1, (0, 1)),)
    assert groups_for(3, MACHINE, ALL) == ((0, 2, (0, 1)), (1, 1, (2, 3)))
    assert groups_for(3, MACHINE, frozenset({0, 2, 3})) == ((0, 1, (0,)), (1, 2, (2, 3)))


def test_node_without_cpus_is_read_from_the_nearest() -> None:
    groups = groups_for({2: 1, 0: 2, 1: 2}, MACHINE, ALL)
    assert groups == ((0, 2, (0, 1)), (1, 2, (2, 3)), (2, 1, (0, 1)))
    assert groups_for({2: 1}, MACHINE, frozenset({2, 3})) == ((2, 1, (2, 3)),)


def test_shares_without_threads_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        groups_for({0: 1, 1: 0}, MACHINE, ALL)
    with pytest.raises(ValueError, match="no node 9"):
        groups_for({9: 1}, MACHINE, ALL)


def test_teams_are_shared_by_those_who_ask_alike() -> None:
    assert team_for(2) is team_for(2)
    assert team_for({0: 1}) is team_for({0: 1})
    assert team_for(2) is not team_for(3)


def test_bound_groups_of_several_nodes_update_everything_once() -> None:
    """More groups than the machine has nodes: what lies on none of theirs is shared out."""
    cpu = _C.allowed_cpus()[0]
    team = _C.WorkerTeam([(0, 2, [cpu]), (77, 1, [cpu])])
    numel = 400_003
    tensors = [torch.ones(numel) for _ in range(4)]
    views = [_C.TensorView(t.data_ptr(), "float32", t.shape, t.stride()) for t in tensors]
    rule = _C.AdamRule(CPUAdam([torch.ones(1)], lr=0.5).defaults, 1)
    _C.run_updates([_C.Update(rule, views[0], views[1], views[2:])], team, kernel=_C.linux_kernel())
    one = [torch.ones(1) for _ in range(4)]
    adam_step(*one, step=1, lr=0.5)
    assert [t.unique().tolist() for t in tensors] == [t.tolist() for t in one]


THREADS_OF_A_STEP = """
import os, sys
import torch
from cxl_offload.ops.adam import CPUAdam, adam_step

wanted = int(sys.argv[1])
torch.set_num_threads(2)
(torch.randn(600, 600) @ torch.randn(600, 600)).exp().sum()
before = len(os.listdir("/proc/self/task"))
tensors = [torch.ones(200_003) for _ in range(4)]
adam_step(*tensors, step=1, lr=0.5, threads=wanted)
print(len(os.listdir("/proc/self/task")) - before, len(tensors[0].unique()))
"""


GROUPS_OF_A_STEP = """
import os
import torch
from cxl_offload import _C
from cxl_offload.ops.adam import CPUAdam

torch.set_num_threads(2)
(torch.randn(600, 600) @ torch.randn(600, 600)).exp().sum()
cpus = _C.allowed_cpus()[:2]
rule = _C.AdamRule(CPUAdam([torch.ones(1)], lr=0.5).defaults, 1)
for groups in ([(0, 1, cpus[:1]), (77, 1, cpus[1:])], [(0, 1, cpus), (77, 1, cpus[1:])]):
    before = len(os.listdir("/proc/self/task"))
    tensors = [torch.ones(400_003) for _ in range(4)]
    views = [_C.TensorView(t.data_ptr(), "float32", t.shape, t.stride()) for t in tensors]
    team = _C.WorkerTeam(groups)
    update = _C.Update(rule, views[0], views[1], views[2:])
    _C.run_updates([update], team, kernel=_C.linux_kernel())
    print(len(os.listdir("/proc/self/task")) - before, len(tensors[0].unique()))
"""


@pytest.mark.slow(reason="a process that loads torch for every case")
@pytest.mark.parametrize(("wanted", "own"), [(2, 0), (3, 2)])
def test_threads_of_openmp_are_borrowed_when_they_are_as_many(wanted: int, own: int) -> None:
    """Their spinning would take the CPUs from threads of our own."""
    done = subprocess.run(
        [sys.executable, "-c", THREADS_OF_A_STEP, str(wanted)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(own), "1"]


@pytest.mark.skipif(len(_C.allowed_cpus()) < 2, reason="needs two CPUs")
def test_threads_of_openmp_are_borrowed_for_groups_that_take_every_cpu() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROUPS_OF_A_STEP], capture_output=True, text=True, check=True
    )
    every_cpu, fewer = done.stdout.splitlines()
    assert every_cpu == "0 1"
    assert fewer == "2 1"


def test_forked_child_of_a_process_with_openmp_threads_has_threads_of_its_own() -> None:
    tensors = [torch.ones(200_003) for _ in range(4)]
    adam_step(*tensors, step=1, lr=0.5, threads=torch.get_num_threads())

    def child() -> None:
        again = [torch.ones(200_003) for _ in range(4)]
        adam_step(*again, step=1, lr=0.5, threads=max(2, torch.get_num_threads()))
        assert [t.tolist()[-1] for t in again] == [t.tolist()[-1] for t in tensors]

    run_in_child(child)


def test_team_refuses_what_cannot_run() -> None:
    for groups in ([], [(0, 0, [])], [(0, 1, []), (0, 1, [])], [(0, 1, [99999])]):
        with pytest.raises(ValueError, match=r"team|threads"):
            _C.WorkerTeam(groups)


def test_attention_of_groups_on_several_nodes_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel is asked where the keys are; node 77 has none of them and helps."""
    source = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 64, generator=source)
    k, v = (torch.randn(3, 2, 900, 64, generator=source).half() for _ in "kv")
    lengths = [900, 0, 513]
    expected = attention.decode_attention(q, k, v, lengths=lengths)
    cpu = _C.allowed_cpus()[0]
    team = _C.WorkerTeam([(0, 2, [cpu]), (77, 1, [cpu])])
    assert kernel_for(team) is not None
    assert kernel_for(team_for(1)) is None
    monkeypatch.setattr(attention, "team_for", lambda threads: team)
    assert torch.equal(attention.decode_attention(q, k, v, lengths=lengths), expected)
