"""Rounds of training: in tiers, under faults, moves and saves, it is what it is without."""

from __future__ import annotations

import random
import signal
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.distributed import checkpoint as dcp

import cxl_offload
from cxl_offload.memory import Bind, Interleave, Policy, Preferred, Session, Weighted
from cxl_offload.ops.checkpoint_stager import TierStager
from tests.faults.ground import KIB, MIB, NODES, check_against_kernel, kernel_of, simulated

from .beside import REFUSED, again, beside, others, pressure
from .ending import goes_on
from .memory import check_returned
from .tiny_gpt import LENGTH, OPTIMIZERS, WORDS, TieredTraining, Training

NODE_BYTES, LEFT_BYTES = 128 * MIB, 17 * MIB
"""What others leave of a node is at least so much; 16 MiB of it is nobody's."""

FAULTY = ["map", "set_policy", "populate", "query", "move"]
BATCHES, ROWS, SAVED_AFTER = 8, 6, 3


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Sequences of tokens, in memory that worker processes inherit."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index].clone()


def training_round(seed: int, seconds: float) -> Counter[str]:
    """Trainings one after the other: on simulated nodes under faults, or on this kernel."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    until = time.monotonic() + seconds
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny matrices
    try:
        while True:
            optimizer = rng.choice(OPTIMIZERS)
            ground = on_simulated_nodes if rng.random() < 0.7 else on_this_kernel
            with ground(rng, counts) as session:
                one_training(rng, optimizer, session, counts)
            if not goes_on(until):
                break
    finally:
        torch.set_num_threads(before)
    return counts


@contextmanager
def on_simulated_nodes(rng: random.Random, counts: Counter[str]) -> Iterator[Session]:
    """Nodes that others fill and empty, under random faults; all of it comes back."""
    session = simulated(NODE_BYTES)
    kernel = kernel_of(session)
    code = rng.choice([1, 5, 12, 16])  # EPERM, EIO, ENOMEM, EBUSY
    kernel.fail_at_random(FAULTY, probability=0.05, seed=rng.getrandbits(32), code=code)
    with beside(others(kernel, rng.getrandbits(32), NODE_BYTES, LEFT_BYTES)):
        yield session
    kernel.clear_faults()
    counts["faults injected"] += kernel.faults_fired
    check_returned(session)


@contextmanager
def on_this_kernel(rng: random.Random, counts: Counter[str]) -> Iterator[Session]:
    """The memory of this machine, while another process takes and leaves some of it."""
    session = Session.linux(limits={0: 512 * MIB})
    with pressure(rng.getrandbits(32)):
        yield session
    counts["trainings on this kernel"] += 1
    check_returned(session)


def policies_of(rng: random.Random, session: Session) -> list[Policy]:
    if not session.is_simulated:
        node = session.machine.usable_nodes()[0].id
        stripes = Interleave((node,), granule_bytes=64 * KIB)
        return [Bind((node,)), Preferred((node,)), stripes]
    return [
        Bind(tuple(rng.sample(NODES, 2))),
        Preferred((rng.choice(NODES),)),
        Interleave((0, 2), granule_bytes=64 * KIB),
        Weighted({0: rng.randint(1, 4), 1: 1, 2: rng.randint(1, 4)}, granule_bytes=4 * KIB),
    ]


def one_training(
    rng: random.Random, optimizer: str, session: Session, counts: Counter[str]
) -> None:
    """A training in tiers, and one that goes on from its checkpoint; both are as without tiers."""
    seed = rng.getrandbits(32)
    rows = torch.randint(WORDS, (40, LENGTH), generator=torch.Generator().manual_seed(seed))
    order = [[rng.randrange(len(rows)) for _ in range(ROWS)] for _ in range(BATCHES)]
    right = Training(optimizer, seed)
    losses = [right.step(rows[batch]) for batch in order[:SAVED_AFTER]]
    midway = {name: each.clone() for name, each in right.tensors().items()}
    losses += [right.step(rows[batch]) for batch in order[SAVED_AFTER:]]
    policies = policies_of(rng, session)
    with cxl_offload.use(session), tempfile.TemporaryDirectory(prefix="soak-") as folder:
        drawn = {kind: rng.choice(policies) for kind in ("states", "gradients", "activations")}
        tiered = TieredTraining(optimizer, seed, drawn, counts)
        run = Run(rng, session, tiered, rows, counts)
        found = run.train(order, policies, Path(folder) / "saved")
        check_same(found, losses, tiered, right)
        resumed = TieredTraining(optimizer, seed + 1, drawn, counts)
        saved = run.saved(Path(folder) / "saved")
        check_tensors(saved, midway)
        resumed.read(saved)
        later = [resumed.step(rows[batch]) for batch in order[SAVED_AFTER:]]
        check_same(later, losses[SAVED_AFTER:], resumed, right)
        if session.is_simulated:
            check_against_kernel(session, [])
    counts["training steps"] += len(order) + len(later)
    counts[f"trainings, {optimizer}"] += 1


def check_same(found: list[float], losses: list[float], tiered: Training, right: Training) -> None:
    """Losses, parameters, states and copies are the same bits."""
    assert found == losses, f"losses {found} are not {losses}"
    check_tensors(tiered.tensors(), right.tensors())


def check_tensors(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(tensors) == sorted(expected)
    wrong = [name for name, each in expected.items() if not torch.equal(each, tensors[name])]
    assert not wrong, f"not as without tiers: {wrong}"


class Run:
    """One training with workers that read its rows, moves beside it, and a save midway."""

    def __init__(
        self,
        rng: random.Random,
        session: Session,
        training: TieredTraining,
        rows: torch.Tensor,
        counts: Counter[str],
    ) -> None:
        self.rng, self.session, self.training, self.counts = rng, session, training, counts
        policy = training.policies["gradients"]
        placed = again(lambda: cxl_offload.from_tensor(rows, policy=policy), counts)
        assert isinstance(placed, torch.Tensor)
        self.rows = placed
        self.stager = TierStager(training.policies["states"], session=session)
        self._movable: list[torch.Tensor] = []
        self._saved: dict[str, torch.Tensor] = {}

    def train(self, order: list[list[int]], policies: list[Policy], path: Path) -> list[float]:
        moves = random.Random(self.rng.getrandbits(32))
        losses = []
        with ExitStack() as stack:
            stack.callback(self._movable.clear)
            stack.enter_context(beside(lambda: self._move(moves, policies), 0.002))
            for at, batch in enumerate(self._loader(order)):
                if at == SAVED_AFTER:
                    writer = self._save(path)
                    stack.callback(writer.join)
                losses.append(self.training.step(batch))
                self._movable[:] = [self.rows, *self.training.movable()]
        assert self.stager.held_bytes == 0, f"the stager holds {self.stager.held_bytes} bytes"
        return losses

    def _loader(self, order: list[list[int]]) -> torch.utils.data.DataLoader[torch.Tensor]:
        workers = self.rng.choice([1, 2])
        self.counts["forked workers"] += workers
        return torch.utils.data.DataLoader(
            Rows(self.rows),
            batch_sampler=order,
            num_workers=workers,
            multiprocessing_context="fork",
            worker_init_fn=_leave_ctrl_c,
        )

    def _move(self, rng: random.Random, policies: list[Policy]) -> None:
        if not self._movable:
            return
        try:
            cxl_offload.move(rng.choice(self._movable), rng.choice(policies), session=self.session)
            self.counts["moves"] += 1
        except (ValueError, IndexError):  # smaller than a page; or training has just ended
            self.counts["refused moves"] += 1
        except REFUSED as error:
            self.counts[type(error).__name__] += 1

    def _save(self, path: Path) -> threading.Thread:
        """Copies at once, and writes while training goes on."""
        tensors = self.training.tensors()
        self._saved = {name: torch.zeros_like(each) for name, each in tensors.items()}
        staged = [again(lambda: self.stager.stage(tensors), self.counts)]

        def write() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.save(staged.pop(), checkpoint_id=path, no_dist=True)

        writer = threading.Thread(target=write, name="checkpoint")
        writer.start()
        self.counts["checkpoints"] += 1
        return writer

    def saved(self, path: Path) -> dict[str, torch.Tensor]:
        """What the checkpoint holds."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(self._saved, checkpoint_id=path, no_dist=True)
        return self._saved


def _leave_ctrl_c(worker: int) -> None:
    """Ctrl-C is the parent's to answer; SIGTERM ends a worker as it would without the soak."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
