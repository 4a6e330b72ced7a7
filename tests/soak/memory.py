"""Rounds of the memory core: a session, threads that use it at random, and what must hold after."""

from __future__ import annotations

import gc
import multiprocessing
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as hypothesis_seed
from hypothesis.stateful import run_state_machine_as_test
from hypothesis.strategies._internal.utils import clear_strategy_cache

from cxl_offload import _C
from cxl_offload.errors import PlacementError
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
from tests.faults.ground import (
    GIB,
    KIB,
    MIB,
    NODES,
    Account,
    check_against_kernel,
    check_all_returned,
    has_stamp,
    kernel_of,
    simulated,
    stamp,
)
from tests.faults.random_session import RandomSession

from .beside import others, pressure
from .ending import goes_on

THREADS = 4
HELD = 24
RUNS_AT_ONCE = 20
NODE_BYTES = 512 * MIB
FAULTY = ["map", "set_policy", "populate", "query", "move"]


@dataclass
class Tally:
    """What happened, over all threads of a round."""

    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, counts: Counter[str]) -> None:
        with self.lock:
            self.counts.update(counts)


class Worker:
    """One thread's random use of a session."""

    def __init__(self, session: Session, seed: int, policies: list[Policy], pin: bool) -> None:
        self.session = session
        self.rng = random.Random(seed)
        self.policies = policies
        self.pin = pin
        self.held: list[tuple[_C.Allocation, int]] = []
        self.counts: Counter[str] = Counter()

    def step(self) -> None:
        draw = self.rng.random()
        try:
            if draw < 0.50 and len(self.held) < HELD:
                self.allocate()
            elif draw < 0.60 and self.held:
                self.move()
            elif draw < 0.605:
                self.session.trim()
                self.counts["trims"] += 1
            elif self.held:
                self.drop()
        except MemoryError:
            self.counts["MemoryError"] += 1
        except OSError:
            self.counts["OSError"] += 1
        except PlacementError:  # a pin that did not come back whole after a move
            self.counts["PlacementError"] += 1

    def allocate(self) -> None:
        nbytes = int(2 ** self.rng.uniform(3, 25))
        policy = self.rng.choice(self.policies)
        pages: Pages = "thp" if self.rng.random() < 0.2 else "base"
        pin = self.pin and not isinstance(policy, FirstTouch) and self.rng.random() < 0.2
        block = self.session.allocate(nbytes, policy, pages=pages, pin=pin)
        value = self.rng.getrandbits(63)
        stamp(block, value)
        if pin and self.rng.random() < 0.5:
            block.record_stream(self.rng.randrange(3))
        self.held.append((block, value))
        self.counts["allocations"] += 1

    def move(self) -> None:
        block, value = self.rng.choice(self.held)
        target = self.rng.choice([p for p in self.policies if not isinstance(p, FirstTouch)])
        try:
            self.session.move(block, target)
            self.counts["moves"] += 1
        except ValueError:  # pinned, or smaller than a page
            self.counts["refused moves"] += 1
        self.check(block, value)

    def drop(self) -> None:
        self.check(*self.held.pop(self.rng.randrange(len(self.held))))
        self.counts["frees"] += 1

    def check(self, block: _C.Allocation, value: int) -> None:
        if not has_stamp(block, value):
            raise AssertionError(f"{block.requested}: {block.nbytes} bytes are not as written")
        self.counts["contents checked"] += 1


def run_threads(workers: list[Worker], until: float, beside: Callable[[], None]) -> Counter[str]:
    """Lets the workers step until the time comes; raises what one of them raised."""
    tally = Tally()
    failures: list[BaseException] = []

    def work(worker: Worker) -> None:
        try:
            while goes_on(until) and not failures:
                worker.step()
            for block, value in worker.held:
                worker.check(block, value)
        except BaseException as error:  # reported by the main thread
            failures.append(error)
        tally.add(worker.counts)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        beside()
        time.sleep(0.01)
    if failures:
        raise failures[0]
    return tally.counts


def simulated_round(seed: int, seconds: float) -> Counter[str]:
    """Three nodes that others fill and empty, under random faults, with pinned memory."""
    rng = random.Random(seed)
    driver = _C.FakeDriver(limit_bytes=256 * MIB)
    session = simulated(NODE_BYTES, driver=driver, limits={1: 400 * MIB})
    kernel = kernel_of(session)
    policies: list[Policy] = [
        Bind((rng.choice(NODES),)),
        Bind((2, 0)),
        Preferred((1,)),
        Interleave((0, 2), granule_bytes=2 * MIB),
        Weighted({0: rng.randint(1, 4), 1: 1, 2: rng.randint(1, 4)}, granule_bytes=2 * MIB),
    ]
    code = rng.choice([1, 5, 12, 16])  # EPERM, EIO, ENOMEM, EBUSY
    kernel.fail_at_random(FAULTY, probability=0.005, seed=seed, code=code)

    fill_and_empty = others(kernel, seed, NODE_BYTES)

    def meanwhile() -> None:
        fill_and_empty()
        driver.finish(rng.randrange(3))

    workers = [Worker(session, seed * 100 + i, policies, pin=True) for i in range(THREADS)]
    counts = run_threads(workers, time.monotonic() + seconds, meanwhile)
    kernel.clear_faults()
    counts["faults injected"] = kernel.faults_fired
    check_against_kernel(session, [block for worker in workers for block, _ in worker.held])
    for worker in workers:
        worker.held.clear()
    check_all_returned(session)
    assert driver.registered_bytes == 0
    return counts


def linux_round(seed: int, seconds: float) -> Counter[str]:
    """The kernel of this machine, with its only policies that every machine has."""
    session = Session.linux(limits={0: GIB}, driver=_C.FakeDriver())
    node = session.machine.usable_nodes()[0].id
    policies: list[Policy] = [
        Bind((node,)),
        Preferred((node,)),
        Interleave((node,), granule_bytes=2 * MIB),
        FirstTouch(),
    ]
    workers = [Worker(session, seed * 100 + i, policies, pin=True) for i in range(THREADS)]
    with pressure(seed):
        counts = run_threads(workers, time.monotonic() + seconds, lambda: None)
    for worker in workers:
        worker.held.clear()
    check_returned(session)
    return counts


def check_returned(session: Session) -> None:
    """As ``check_all_returned``, of a session on simulated nodes or on this kernel."""
    gc.collect()
    if session.is_simulated:
        check_all_returned(session)
        return
    session.trim()
    assert Account.of(session) == Account(0, 0, 0)
    assert session.stats().mapped_bytes.current == 0
    assert all(use.current_bytes == 0 for use in session.stats().nodes.values())


def model_round(seed: int, seconds: float) -> Counter[str]:
    """The state machine of the tests, for longer."""
    counts: Counter[str] = Counter()
    until = time.monotonic() + seconds
    machine = hypothesis_seed(seed)(RandomSession)
    while goes_on(until):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=RUNS_AT_ONCE,
                stateful_step_count=60,
                deadline=None,
                database=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            ),
        )
        counts["model runs"] += RUNS_AT_ONCE
        machine = hypothesis_seed(seed := seed + 10_000)(RandomSession)
    clear_strategy_cache()  # Hypothesis's own; it would look as if rounds lost memory
    return counts


def _read(blocks: list[tuple[_C.Allocation, int]]) -> None:
    raise SystemExit(0 if all(has_stamp(block, value) for block, value in blocks) else 1)


def fork_round(seed: int, seconds: float) -> Counter[str]:
    """Children read what they inherit while threads of the parent allocate."""
    session = simulated(NODE_BYTES)
    kept = [(session.allocate(64 * KIB << i, Bind((i % 3,))), seed + i) for i in range(8)]
    for block, value in kept:
        stamp(block, value)
    forked: Counter[str] = Counter()
    fork = multiprocessing.get_context("fork")

    def beside() -> None:
        child = fork.Process(target=_read, args=(kept,))
        child.start()
        child.join(30)
        assert child.exitcode == 0, f"a child ended with {child.exitcode}"
        forked["forked children"] += 1

    workers = [Worker(session, seed * 100 + i, [Bind((0,)), Bind((1,))], False) for i in range(2)]
    counts = run_threads(workers, time.monotonic() + seconds, beside)
    for worker in workers:
        worker.held.clear()
    assert all(has_stamp(block, value) for block, value in kept)
    del block
    kept.clear()
    check_all_returned(session)
    return counts + forked
