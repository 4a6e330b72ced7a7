"""Every call of the kernel seam fails once at every place where it is used.

Each scenario is first run without faults while the calls it makes are counted; then it is run again
for every call of every operation, with that call failing in every way that it can. The test's id
names scenario, operation, effect and errno, and each of its calls is a scenario run anew; the
number of a call that loses something is in the traceback. Nothing else decides what happens.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from cxl_offload import _C
from cxl_offload.memory import (
    Bind,
    FirstTouch,
    Interleave,
    Pages,
    Policy,
    Preferred,
    Session,
    Weighted,
)

from .ground import (
    GIB,
    MIB,
    Account,
    check_against_kernel,
    check_all_returned,
    has_stamp,
    kernel_of,
    simulated,
    stamp,
)

POLICIES: dict[str, Policy] = {
    "bind:2": Bind((2,)),
    "bind:2,0": Bind((2, 0)),
    "preferred:1": Preferred((1,)),
    "first-touch": FirstTouch(),
    "interleave:0,1": Interleave((0, 1), granule_bytes=32 * MIB),
    "weighted:0=2,2=1": Weighted({0: 2, 2: 1}, granule_bytes=32 * MIB),
}
# Of allocations that fill one node, more than one chunk of faulting in (64 MiB) where that can be;
# and of those that need a second node.
ONE_NODE_BYTES = {"base": 160 * MIB, "thp": 160 * MIB, "2MiB": 48 * MIB, "1GiB": 2 * GIB}
TWO_NODES_BYTES = {"base": 200 * MIB, "thp": 200 * MIB, "2MiB": 100 * MIB, "1GiB": 3 * GIB}
PATTERN = 0x5EED


@dataclass(frozen=True)
class Way:
    """One way in which a call can go wrong."""

    operation: str
    effect: _C.FaultEffect
    code: int
    times: int = 1

    def __str__(self) -> str:
        effect = str(self.effect).rsplit(".")[-1]
        name = "" if self.effect in SUCCEEDING else f"-{errno.errorcode[self.code]}"
        return f"{effect}{name}{'-forever' if self.times > 1 else ''}"


REFUSE, PARTIAL, STRAY = _C.FaultEffect.refuse, _C.FaultEffect.partial, _C.FaultEffect.stray
HIDDEN = _C.FaultEffect.hidden
SUCCEEDING = (STRAY, HIDDEN)
FOREVER = 60
WAYS = (
    Way("map", REFUSE, errno.ENOMEM),
    Way("map", REFUSE, errno.ENOMEM, FOREVER),
    Way("map", REFUSE, errno.EPERM),
    Way("set_policy", REFUSE, errno.EPERM),
    Way("set_policy", REFUSE, errno.EINVAL, FOREVER),
    Way("populate", REFUSE, errno.ENOMEM),
    Way("populate", REFUSE, errno.ENOMEM, FOREVER),
    Way("populate", REFUSE, errno.EIO),
    Way("populate", PARTIAL, errno.ENOMEM),
    Way("populate", PARTIAL, errno.ENOMEM, FOREVER),
    Way("populate", PARTIAL, errno.EIO),
    Way("populate", STRAY, errno.ENOMEM),
    Way("query", HIDDEN, errno.ENOMEM),
    Way("query", REFUSE, errno.EPERM),
    Way("query", REFUSE, errno.EPERM, FOREVER),
    Way("query", REFUSE, errno.ENOMEM),
    Way("move", REFUSE, errno.EPERM),
    Way("move", REFUSE, errno.EPERM, FOREVER),
    Way("move", REFUSE, errno.EBUSY),
    Way("move", PARTIAL, errno.ENOMEM),
    Way("move", PARTIAL, errno.EIO),
    Way("discard", REFUSE, errno.EPERM),
)


@dataclass
class Stage:
    """A session with what a scenario needs there before it begins."""

    session: Session
    driver: _C.FakeDriver
    blocks: list[_C.Allocation] = field(default_factory=list)


@dataclass(frozen=True)
class Scenario:
    name: str
    act: Callable[[Stage], _C.Allocation | None]
    prepare: Callable[[Stage], None] = lambda stage: None
    counts_pages: bool = True  # False where pages of first touch are, which nobody counts

    @property
    def stamps(self) -> bool:
        return self.name.startswith("move")

    def stage(self) -> Stage:
        driver = _C.FakeDriver()
        # One thread, so that the n-th call of a run is the n-th call of every run.
        session = simulated(192 * MIB, huge_2mib=40, huge_1gib=2, driver=driver, max_threads=1)
        stage = Stage(session, driver)
        self.prepare(stage)
        return stage


def allocation(policy: str, pages: Pages, *, pin: bool = False, astray: bool = False) -> Scenario:
    nbytes = (ONE_NODE_BYTES if policy == "bind:2" else TWO_NODES_BYTES)[pages]
    rule = POLICIES[policy]
    if pages == "1GiB" and isinstance(rule, Interleave | Weighted):
        rule = replace(rule, granule_bytes=GIB)

    def act(stage: Stage) -> _C.Allocation:
        if astray:  # the kernel passes the node over, and pages have to be moved there
            kernel_of(stage.session).fail("populate", effect=STRAY, times=FOREVER)
        return stage.session.allocate(nbytes, rule, pages=pages, pin=pin)

    name = f"allocate-{policy}-{pages}" + "-pinned" * pin + "-astray" * astray
    return Scenario(name, act, counts_pages=policy != "first-touch")


def allocation_past_holes(stage: Stage) -> _C.Allocation:
    """The pool holds free memory that does not fit, gives it back, and maps anew."""
    return stage.session.allocate(40 * MIB, Bind((0,)))


def make_holes(stage: Stage) -> None:
    stage.blocks = [stage.session.allocate(6 * MIB, Bind((0,))) for _ in range(12)][::2]


def allocation_into_another_s_cache(stage: Stage) -> _C.Allocation:
    """Only what the pool of other pages caches makes room on the node."""
    return stage.session.allocate(150 * MIB, Bind((2,)))


def fill_another_s_cache(stage: Stage) -> None:
    stage.session.allocate(150 * MIB, Bind((2,)), pages="thp")  # dropped at once


def movement(source: str, target: str, pages: Pages) -> Scenario:
    def prepare(stage: Stage) -> None:
        nbytes = 128 * MIB if pages == "base" else 64 * MIB
        block = stage.session.allocate(nbytes, POLICIES[source], pages=pages)
        stamp(block, PATTERN)
        stage.blocks.append(block)

    def act(stage: Stage) -> None:
        stage.session.move(stage.blocks[0], POLICIES[target])

    counts = source != "first-touch"
    return Scenario(f"move-{source}-to-{target}-{pages}", act, prepare, counts_pages=counts)


def scenarios() -> Iterator[Scenario]:
    every_kind: tuple[Pages, ...] = ("base", "thp", "2MiB", "1GiB")
    for policy in POLICIES:
        for pages in every_kind:
            yield allocation(policy, pages)
        if policy != "first-touch":
            yield allocation(policy, "base", pin=True)
            yield allocation(policy, "2MiB", astray=True)
    yield Scenario("allocate-100-bytes", lambda stage: stage.session.allocate(100, Bind((1,))))
    yield Scenario("allocate-past-holes", allocation_past_holes, make_holes)
    yield Scenario(
        "allocate-into-another-s-cache", allocation_into_another_s_cache, fill_another_s_cache
    )
    for pages in every_kind[:3:2]:
        yield movement("bind:2", "interleave:0,1", pages)
        yield movement("interleave:0,1", "bind:2", pages)
        yield movement("weighted:0=2,2=1", "preferred:1", pages)
        yield movement("first-touch", "weighted:0=2,2=1", pages)


def places_of(stage: Stage, result: _C.Allocation | None) -> list[dict[int, int]]:
    blocks = [*stage.blocks, *([] if result is None else [result])]
    return [block.bytes_per_node() for block in blocks]


def calls_made(scenario: Scenario) -> dict[str, int]:
    stage = scenario.stage()
    before = kernel_of(stage.session).calls
    result = scenario.act(stage)
    after = kernel_of(stage.session).calls
    del result
    return {operation: after[operation] - before[operation] for operation in after}


def sites() -> Iterator[Any]:
    for scenario in scenarios():
        calls = calls_made(scenario)
        for way in WAYS:
            if count := calls[way.operation]:
                name = f"{scenario.name}:{way.operation}:{way}"
                yield pytest.param(scenario, way, count, id=name)


def act_under(
    scenario: Scenario, stage: Stage, way: Way, call: int
) -> tuple[_C.Allocation | None, Exception | None]:
    kernel = kernel_of(stage.session)
    kernel.fail(way.operation, call=call, code=way.code, effect=way.effect, times=way.times)
    fired = kernel.faults_fired
    try:
        return scenario.act(stage), None
    except (MemoryError, OSError) as error:
        return None, error.with_traceback(None)  # whose frames hold blocks
    finally:
        assert kernel.faults_fired > fired
        kernel.clear_faults()


def check_error(way: Way, error: Exception | None) -> None:
    if way.effect in SUCCEEDING:
        assert error is None
    elif way.code != errno.ENOMEM:
        assert isinstance(error, OSError)
        assert error.errno == way.code
    elif way.times == FOREVER:
        assert isinstance(error, MemoryError)
    else:  # a second attempt may have found the room
        assert error is None or isinstance(error, MemoryError)
    if error is not None:
        assert "\n" not in str(error)
        assert way.operation in str(error)


@pytest.mark.sampled(97)
@pytest.mark.parametrize(("scenario", "way", "count"), list(sites()))
def test_nothing_is_lost_when_one_call_fails(scenario: Scenario, way: Way, count: int) -> None:
    clean = scenario.stage()
    wanted = places_of(clean, scenario.act(clean))
    for call in range(1, count + 1):
        check_nothing_is_lost(scenario, way, call, wanted)


def check_nothing_is_lost(
    scenario: Scenario, way: Way, call: int, wanted: list[dict[int, int]]
) -> None:
    stage = scenario.stage()
    before = Account.of(stage.session), places_of(stage, None)
    result, error = act_under(scenario, stage, way, call)
    check_error(way, error)
    if error is None:
        assert places_of(stage, result) == wanted
    else:
        assert Account.of(stage.session) == before[0]
        if way.times == 1 and scenario.counts_pages:
            assert places_of(stage, None) == before[1]
    assert all(has_stamp(block, PATTERN) for block in stage.blocks if scenario.stamps)
    if scenario.counts_pages and way.times == 1:
        check_against_kernel(stage.session, [*stage.blocks, *([result] if result else [])])
    del result
    result = scenario.act(stage)
    assert places_of(stage, result) == wanted
    kernel_of(stage.session).clear_faults()
    del result
    stage.blocks.clear()
    check_all_returned(stage.session)
    assert stage.driver.registered_bytes == 0


@pytest.mark.parametrize(
    "scenario", [s for s in scenarios() if s.name.endswith("pinned")], ids=lambda s: s.name
)
def test_nothing_is_lost_when_registration_fails(scenario: Scenario) -> None:
    stage = scenario.stage()
    stage.driver.fail_registration(1)
    with pytest.raises(OSError) as error:  # noqa: PT011  the errno is the driver's own
        scenario.act(stage)
    assert "\n" not in str(error.value)
    assert Account.of(stage.session) == Account(0, 0, 0)
    check_against_kernel(stage.session, [])
    assert stage.driver.registered_bytes == 0
    result = scenario.act(stage)
    assert result is not None
    assert result.pinned
    del result
    check_all_returned(stage.session)


def test_dropping_and_trimming_make_no_call_that_can_fail() -> None:
    stage = Scenario("holes", allocation_past_holes, make_holes).stage()
    calls = kernel_of(stage.session).calls
    for operation in calls:
        kernel_of(stage.session).fail(operation, code=errno.EPERM, times=FOREVER)
    del stage.blocks[1::2]
    assert stage.session.trim() > 0
    stage.blocks.clear()
    check_all_returned(stage.session)
    assert kernel_of(stage.session).calls == calls


def test_asking_for_places_reports_the_refusal_and_changes_nothing() -> None:
    session = simulated(192 * MIB)
    block = session.allocate(8 * MIB, Bind((1,)))
    kernel_of(session).fail("query", code=errno.EPERM)
    with pytest.raises(PermissionError):
        session.placement(block.address, block.nbytes)
    assert session.placement(block.address, block.nbytes).granted == {1: 8 * MIB}
