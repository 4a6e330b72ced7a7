"""Random decisions on nodes that others fill, under faults and with copies in flight.

``python -m tests.tune.random_decisions --decisions 100000 [--seed N]``; status 1 on a failure.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys
from collections import Counter
from typing import Any

import numpy as np

from cxl_offload import _C
from cxl_offload.memory import Bind, Session
from cxl_offload.tune import MostUsedParts, MostUsedRule, Slice, TunedHomes
from tests.faults.ground import (
    KIB,
    MIB,
    NODES,
    check_against_kernel,
    check_all_returned,
    has_stamp,
    kernel_of,
    simulated,
    stamp,
)

NEAR, FAR = 0, 2
NODE_BYTES = 64 * MIB
FAR_CAPACITY = 24 * MIB
SIZES = (64 * KIB, 192 * KIB, MIB, 3 * MIB, 2 * MIB)
PINNED_SIZES = (256 * KIB, MIB)
PARTS, PART_BYTES = 16, 128 * KIB
ERRORS = (1, 5, 12, 16)  # EPERM, EIO, ENOMEM, EBUSY
STREAM = 1
TARGET = np.zeros(max(PINNED_SIZES), dtype=np.uint8)
"""Of copies: it outlives the driver, which finishes them when it goes."""


class Owned:
    """Stands in for a tensor."""

    def __init__(self, block: Any) -> None:
        self.block = block

    def data_ptr(self) -> int:
        return int(self.block.address)


class Ground:
    """Tensors and parts on one simulated machine, and what must hold after every decision."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.driver = _C.FakeDriver()
        self.session: Session = simulated(
            NODE_BYTES, driver=self.driver, limits={FAR: FAR_CAPACITY}, max_threads=1
        )
        self.kernel = kernel_of(self.session)
        near = Bind((NEAR,))
        self.free = [self.session.allocate(size, near) for size in SIZES]
        self.pinned = [self.session.allocate(size, near, pin=True) for size in PINNED_SIZES]
        self.stack = self.session.allocate(PARTS * PART_BYTES, Bind((FAR,)))
        self.blocks = [*self.free, *self.pinned, self.stack]
        for number, block in enumerate(self.blocks):
            stamp(block, seed + number)
        for block in self.pinned:
            block.record_stream(STREAM)
        self.seed = seed
        owned: Any = {str(at): Owned(block) for at, block in enumerate([*self.free, *self.pinned])}
        self.homes = TunedHomes(owned, near=[NEAR], far=[FAR], session=self.session)
        slices = {
            str(at): [Slice(self.stack.address + at * PART_BYTES, PART_BYTES)]
            for at in range(PARTS)
        }
        self.parts = MostUsedParts(
            slices, near=[NEAR], far=[FAR], room_bytes=4 * PART_BYTES, session=self.session,
            budget_bytes_per_round=MIB, rule=MostUsedRule(half_life=8.0, traffic=1.0),
        )  # fmt: skip
        self.counts: Counter[str] = Counter()

    def disturb(self) -> None:
        """Others take or give back room, calls fail, or a copy is queued.

        Questions to the kernel do not fail: where a move fails, going back fails, and the kernel
        will not say where the pages are, nobody can know (tests/faults has each of these alone).
        """
        draw = self.rng.random()
        if draw < 0.3:
            node = self.rng.choice(NODES)
            held = self.kernel.used_bytes(node)
            self.kernel.set_used_by_others(node, self.rng.randrange(0, NODE_BYTES - held + 1))
        elif draw < 0.5:
            self.kernel.fail_at_random(
                ["populate", "set_policy", "move"], probability=self.rng.choice((0.01, 0.1)),
                seed=self.rng.randrange(1 << 30), code=self.rng.choice(ERRORS),
            )  # fmt: skip
        elif draw < 0.7:
            self.kernel.clear_faults()
        else:
            self.queue_copy()

    def queue_copy(self) -> None:
        block = self.rng.choice(self.pinned)
        if block.pinned:  # a driver that refused to pin again has left it unpinned
            self.driver.copy(
                target=TARGET.ctypes.data, source=block.address, nbytes=block.nbytes,
                stream=STREAM,
            )  # fmt: skip
            self.counts["copies queued"] += 1

    def decide(self) -> None:
        """One random decision, carried out as far as the nodes and the kernel let it."""
        before = [self.nodes_of(block) for block in self.pinned]
        in_flight = self.driver.pending(STREAM) > 0
        if self.rng.random() < 0.5:
            self.homes.aim(self.rng.choice((0.0, 1.0, 0.5, 1 / 11, self.rng.random())))
            moved = self.homes.advance(self.rng.choice((MIB, 4 * MIB, 64 * MIB)))
            self.counts["refused"] += moved.refused is not None
            self.counts["bytes moved"] += moved.nbytes
        else:
            was = self.parts.moved_bytes
            self.parts.round([self.rng.randrange(3) for _ in range(PARTS)])
            self.counts["bytes moved"] += self.parts.moved_bytes - was
        self.counts["decisions"] += 1
        if in_flight and self.driver.pending(STREAM):
            after = [self.nodes_of(block) for block in self.pinned]
            assert after == before, "pages moved while a copy was in flight"
            self.counts["copies waited with"] += 1

    @staticmethod
    def nodes_of(block: Any) -> list[tuple[int, int, int]]:
        """As the session keeps them, which :meth:`check` compares with the pages."""
        runs: list[tuple[int, int, int]] = block.runs(0, block.nbytes)
        return runs

    def check(self) -> None:
        """No node is overfilled, the books are right, and every byte is as it was written."""
        self.kernel.clear_faults()
        use = self.session.stats().nodes
        assert use[FAR].current_bytes <= FAR_CAPACITY
        for node in NODES:
            assert self.session.free_bytes(node) >= 0
        check_against_kernel(self.session, self.blocks)
        assert all(has_stamp(block, self.seed + number) for number, block in enumerate(self.blocks))

    def close(self) -> None:
        self.check()
        self.driver.finish(STREAM)
        del self.homes, self.parts
        self.free.clear()
        self.pinned.clear()
        self.blocks.clear()
        del self.stack
        gc.collect()  # frames of the refusals
        check_all_returned(self.session)


def run(seed: int, decisions: int) -> Counter[str]:
    """So many decisions on one machine; raises AssertionError where anything does not hold."""
    ground = Ground(seed)
    for number in range(decisions):
        if ground.rng.random() < 0.3:
            ground.disturb()
        ground.decide()
        if number % 50 == 0:
            ground.check()
    ground.counts["faults"] = ground.kernel.faults_fired
    ground.close()
    return ground.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--decisions", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    total: Counter[str] = Counter()
    seed = options.seed
    while total["decisions"] < options.decisions:
        try:
            total += run(seed, min(1000, options.decisions - total["decisions"]))
        except BaseException:
            sys.stdout.write(f"FAILED with --seed {seed} --decisions 1000\n")
            raise
        seed += 1
    for name, count in sorted(total.items()):
        sys.stdout.write(f"{name}: {count:,}\n")


if __name__ == "__main__":
    main()
