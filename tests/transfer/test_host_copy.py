"""Host copies against numpy's own, at odd sizes and addresses, by every way."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cxl_offload import _C
from cxl_offload.errors import ConfigError
from cxl_offload.topology import Machine, Node, NodeKind
from cxl_offload.transfer import CopyRule, HostCopier, cpus_near, load_rules, measure_rules
from cxl_offload.transfer.host import fewest_rules, save_rules

CPUS = _C.allowed_cpus()
# The same CPU twice where there is one only: two threads all the same.
PAIR = [CPUS[0], CPUS[-1]]
WAYS = [(False, 1), (True, 1), (False, 2), (True, 2)]


def copier_of(way: tuple[bool, int], isa: str = "") -> Any:
    return _C.HostCopier(PAIR[1:], [(0, *way)], isa)


def random_bytes(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("isa", _C.supported_isas())
@pytest.mark.parametrize("nbytes", [0, 1, 63, 511, 512, 4097, 70001, (1 << 20) + 3])
def test_copy_moves_these_bytes_and_no_other(way: Any, isa: str, nbytes: int) -> None:
    copier = copier_of(way, isa)
    for to, origin in [(0, 0), (1, 0), (63, 7), (64, 33)]:
        source = random_bytes(nbytes + 128, 1)
        target = np.full(nbytes + 192, 0xEE, np.uint8)
        expected = target.copy()
        expected[to : to + nbytes] = source[origin : origin + nbytes]
        copier.copy(
            target=target.ctypes.data + to, source=source.ctypes.data + origin, nbytes=nbytes
        )
        assert (target == expected).all()


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=12, deadline=None)
@given(sizes=st.lists(st.integers(0, 90_000), max_size=40), seed=st.integers(0, 99))
def test_blocks_are_gathered_and_scattered(way: Any, sizes: list[int], seed: int) -> None:
    order = np.random.default_rng(seed)
    room = sum(sizes) + 1
    source = random_bytes(room, seed)
    target = np.full(room, 0xEE, np.uint8)
    expected = target.copy()
    starts = np.concatenate([[0], np.cumsum(sizes)])[:-1].astype(np.int64)
    places = dict(zip(order.permutation(len(sizes)), range(len(sizes)), strict=True))
    to, at = np.zeros(len(sizes), np.int64), 0
    for index in sorted(places, key=places.__getitem__):
        to[index] = at
        at += sizes[index]
    for begin, start, size in zip(to, starts, sizes, strict=True):
        expected[begin : begin + size] = source[start : start + size]
    copier = HostCopier(cpus=PAIR, rules=[CopyRule(0, *way)])
    copier.copy_blocks(
        targets=(to + target.ctypes.data).astype(np.uint64),
        sources=(starts + source.ctypes.data).astype(np.uint64),
        sizes=sizes,
    )
    assert (target == expected).all()


def test_one_size_serves_all_blocks() -> None:
    source, target = random_bytes(4096), np.zeros(4096, np.uint8)
    addresses = [[base.ctypes.data + at for at in range(0, 4096, 512)] for base in (target, source)]
    HostCopier().copy_blocks(targets=addresses[0][::-1], sources=addresses[1], sizes=512)
    assert (target.reshape(8, 512) == source.reshape(8, 512)[::-1]).all()


def test_lists_that_do_not_match_are_refused_before_any_copy() -> None:
    target, source = np.zeros(64, np.uint8), random_bytes(64)
    with pytest.raises(ValueError, match="2 sources"):
        HostCopier().copy_blocks(
            targets=[target.ctypes.data], sources=[source.ctypes.data] * 2, sizes=8
        )
    with pytest.raises(ValueError, match="-1"):
        HostCopier().copy_blocks(
            targets=[target.ctypes.data], sources=[source.ctypes.data], sizes=-1
        )
    with pytest.raises(ValueError, match="-1"):
        HostCopier().copy(target=target.ctypes.data, source=source.ctypes.data, nbytes=-1)
    assert not target.any()


@st.composite
def views(draw: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Two views of one shape over memory of their own, with gaps and in any order."""
    rank = draw(st.integers(0, 4))
    dtype = draw(st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.complex128]))
    shape = draw(st.lists(st.integers(0, 9), min_size=rank, max_size=rank))

    def view(value: int) -> torch.Tensor:
        order = draw(st.permutations(range(rank)))
        steps = draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank))
        room = [shape[axis] * step for axis, step in zip(order, steps, strict=True)]
        base = torch.arange(value, value + int(np.prod(room))).to(dtype).reshape(room)
        cut = base[tuple(slice(None, None, step) for step in steps)]
        back = [order.index(axis) for axis in range(rank)]
        return cut.permute(back)

    target, source = view(0), view(7)
    if rank and draw(st.booleans()) and shape[0] > 0:
        source = source[:1].expand(shape)
    return target, source


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=30, deadline=None)
@given(pair=views())
def test_strided_copy_is_torch_s_own(way: Any, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    target, source = pair
    base = target if target._base is None else target._base
    expected = base.clone()
    mirror = expected.as_strided(target.shape, target.stride(), target.storage_offset())
    mirror.copy_(source)
    HostCopier(cpus=PAIR, rules=[CopyRule(0, *way)]).copy_strided(target=target, source=source)
    assert torch.equal(
        torch.view_as_real(base) if base.is_complex() else base,
        torch.view_as_real(expected) if expected.is_complex() else expected,
    )


def test_transpose_of_many_rows() -> None:
    source = torch.randn(513, 257)
    target = torch.empty(257, 513)
    HostCopier(cpus=PAIR, rules=[CopyRule(0, False, 2)]).copy_strided(
        target=target, source=source.t()
    )
    assert torch.equal(target, source.t().contiguous())


def test_strided_copy_refuses_what_has_no_meaning() -> None:
    copier, tensor = HostCopier(), torch.zeros(4, 4)
    with pytest.raises(ValueError, match=r"\(4, 4\)"):
        copier.copy_strided(target=torch.zeros(4), source=tensor)
    with pytest.raises(ValueError, match="2 B"):
        copier.copy_strided(target=torch.zeros(4, 4, dtype=torch.float16), source=tensor)
    with pytest.raises(ValueError, match="share memory"):
        copier.copy_strided(target=torch.zeros(1, 4).expand(4, 4), source=tensor)


def test_copies_from_many_threads_stay_apart() -> None:
    copier = HostCopier(cpus=PAIR, rules=[CopyRule(0, True, 2)])
    wrong: list[int] = []

    def work(seed: int) -> None:
        source = random_bytes(300_001, seed)
        for _ in range(20):
            target = np.zeros_like(source)
            copier.copy(target=target.ctypes.data, source=source.ctypes.data, nbytes=source.size)
            if not (target == source).all():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        ([], "none given"),
        ([(5, False, 1)], "begin at 0"),
        ([(0, False, 1), (0, True, 1)], "ascend"),
        ([(0, False, 3)], "3 threads"),
        ([(0, False, 0)], "0 threads"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        HostCopier(cpus=PAIR, rules=[CopyRule(*rule) for rule in rules])


def test_cpu_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ValueError, match="CPU 9999"):
        HostCopier(cpus=[CPUS[0], 9999])


def brute_force(seconds: Any) -> float:
    """The least cost of all assignments of ways to sizes."""
    costs = []
    for chosen in itertools.product(range(len(seconds[0])), repeat=len(seconds)):
        lost = sum(np.log(row[way] / min(row)) for way, row in zip(chosen, seconds, strict=True))
        changes = sum(a != b for a, b in itertools.pairwise([0, *chosen]))
        costs.append(lost + 0.08 * changes)
    return float(min(costs))


@given(st.lists(st.lists(st.floats(1, 1.3), min_size=3, max_size=3), min_size=1, max_size=5))
def test_rules_cost_no_more_than_the_best_of_all(seconds: Any) -> None:
    sizes = [4096 << step for step in range(len(seconds))]
    rules = fewest_rules(sizes, WAYS[:3], seconds)
    ways = [[rule.way for rule in rules if rule.from_bytes <= size][-1] for size in sizes]
    lost = sum(
        np.log(row[WAYS.index(way)] / min(row)) for way, row in zip(ways, seconds, strict=True)
    )
    assert lost + 0.08 * (len(rules) - 1) == pytest.approx(brute_force(seconds), abs=1e-9)


def test_one_noisy_size_makes_no_rule() -> None:
    steady = [1.0, 0.85]
    seconds = [[1.0, 1.1], [1.0, 1.1], steady, steady, steady, [0.95, 1.0], steady]
    sizes = [4096 << step for step in range(7)]
    assert fewest_rules(sizes, WAYS[:2], seconds) == (
        CopyRule(0, False, 1),
        CopyRule(16384, True, 1),
    )


def test_measured_rules_are_usable_and_survive_a_file(tmp_path: Path) -> None:
    source, target = random_bytes(1 << 20), np.zeros(1 << 20, np.uint8)
    rules = measure_rules(
        target=target.ctypes.data,
        source=source.ctypes.data,
        room_bytes=1 << 20,
        cpus=PAIR,
        rounds=3,
    )
    assert rules[0].from_bytes == 0
    assert (target == source).all()
    save_rules(tmp_path / "rules.json", rules)
    assert load_rules(tmp_path / "rules.json") == rules
    assert HostCopier(cpus=PAIR, rules=rules).rules == rules


def test_copiers_take_the_rules_of_the_named_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = (CopyRule(0, False, 1), CopyRule(8192, True, 1), CopyRule(1 << 20, True, 2))
    save_rules(tmp_path / "rules.json", rules)
    monkeypatch.setenv("CXL_OFFLOAD_COPY_RULES", str(tmp_path / "rules.json"))
    assert HostCopier(cpus=PAIR).rules == rules
    # With fewer CPUs than measured, fewer threads.
    assert [rule.threads for rule in HostCopier(cpus=PAIR[:1]).rules] == [1, 1, 1]
    monkeypatch.setenv("CXL_OFFLOAD_COPY_RULES", str(tmp_path / "absent.json"))
    with pytest.raises(ConfigError, match=r"absent\.json"):
        HostCopier(cpus=PAIR)


@pytest.mark.parametrize("text", ["", "{}", '{"copy_rules": []}', '{"copy_rules": [{"from": 0}]}'])
def test_damaged_rules_name_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "rules.json").write_text(text)
    with pytest.raises(ConfigError, match=r"rules\.json"):
        load_rules(tmp_path / "rules.json")


def test_node_without_cpus_is_served_by_the_nearest_that_has_some() -> None:
    machine = Machine(
        name="two-and-cxl",
        nodes=(
            Node(id=0, kind=NodeKind.DRAM, cpus=(9000,), capacity_bytes=1),
            Node(id=1, kind=NodeKind.DRAM, cpus=(CPUS[0],), capacity_bytes=1),
            Node(id=2, kind=NodeKind.CXL, cpus=(), capacity_bytes=1),
        ),
        distances={2: {0: 14, 1: 24, 2: 10}, 1: {0: 21, 1: 10, 2: 24}},
        tiers=(),
    )
    assert cpus_near(machine, 1) == [CPUS[0]]
    assert cpus_near(machine, 2) == [CPUS[0]]


def test_timed_blocks_are_copied_and_both_ways_have_every_round() -> None:
    source, target = random_bytes(16 * 4096, 3), np.zeros(16 * 4096, np.uint8)
    order = np.random.default_rng(4).permutation(16).astype(np.uint64) * np.uint64(4096)
    places = np.arange(16, dtype=np.uint64) * np.uint64(4096)
    own, memcpys = HostCopier(cpus=PAIR).time_blocks(
        targets=places + np.uint64(target.ctypes.data),
        sources=order + np.uint64(source.ctypes.data),
        sizes=4096,
        job=6,
        rounds=5,
    )
    assert len(own) == len(memcpys) == 5
    assert min(own + memcpys) > 0
    expected = source.reshape(16, 4096)[(order // 4096).astype(int)]
    # 11 jobs of 6: blocks 0-5, 6-11, and again, as 12-17 would be beyond the end
    assert (target.reshape(16, 4096)[:12] == expected[:12]).all()
    assert not target.reshape(16, 4096)[12:].any()
    with pytest.raises(ValueError, match="copy 3 sources"):
        HostCopier(cpus=PAIR).time_blocks(
            targets=places, sources=order[:3], sizes=4096, job=1, rounds=1
        )
    with pytest.raises(ValueError, match="jobs of 17 blocks"):
        HostCopier(cpus=PAIR).time_blocks(
            targets=places, sources=places, sizes=4096, job=17, rounds=1
        )
