"""Rounds of generation: models with KV cache and weights in tiers say what stock says."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from cxl_offload.integrations.transformers import offload
from cxl_offload.memory import Session
from tests.faults.ground import MIB, check_against_kernel, kernel_of, simulated
from tests.integrations.transformers.models import VOCAB, generate, make

from .beside import REFUSED, beside, others, pressure
from .ending import goes_on
from .memory import check_returned

NODE_BYTES, LEFT_BYTES = 128 * MIB, 18 * MIB
FAULTY = ["map", "set_policy", "populate", "query", "move"]
FAMILIES = ("opt", "llama", "mistral", "gpt2", "gemma3", "mixtral")
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"num_beams": 3, "num_return_sequences": 2},
    {"cache_implementation": "static"},
)
THREADS = 3


class FailsAtToken(LogitsProcessor):  # type: ignore[misc]
    """What a user's own code does in the middle of ``generate()``."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            raise StopHereError
        return scores


class StopHereError(Exception):
    """Of :class:`FailsAtToken`."""


class Writer:
    """A model, what it says in ordinary memory, and a thread that asks it again in tiers."""

    def __init__(self, rng: random.Random, session: Session) -> None:
        self.rng = random.Random(rng.getrandbits(64))
        self.session = session
        self.model: PreTrainedModel = make(self.rng.choice(FAMILIES))
        self.asked = [(self._prompt(), way) for way in WAYS]
        self.right = [generate(self.model, "sdpa", **ids, **way) for ids, way in self.asked]
        self.counts: Counter[str] = Counter()

    def _prompt(self) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(self.rng.getrandbits(32))
        shape = self.rng.randint(1, 3), self.rng.randint(2, 30)
        ids = torch.randint(3, VOCAB, shape, generator=draw)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def step(self) -> None:
        """Asks everything once inside of a block, some of it with an exception midway."""
        policies = {"kv": self._policy()}
        if self.rng.random() < 0.5:
            policies["weights"] = self._policy()
        try:
            with offload(self.model, policies, session=self.session):
                for at in range(len(WAYS)):
                    if self.rng.random() < 0.3:
                        self._fail_midway(at)
                    self._ask(at)
        except REFUSED as error:
            self.counts[type(error).__name__] += 1

    def _policy(self) -> str:
        if not self.session.is_simulated:
            return f"bind:{self.session.machine.usable_nodes()[0].id}"
        return self.rng.choice(
            ["bind:2", "bind:0,1", "preferred:1", "interleave:0,2@64KiB", "weighted:0=3,2=1@64KiB"]
        )

    def _ask(self, at: int) -> None:
        ids, way = self.asked[at]
        tokens = generate(self.model, **ids, **way)
        assert torch.equal(tokens, self.right[at]), (
            f"{self.model.config.model_type} {way}: {tokens.tolist()} is not "
            f"{self.right[at].tolist()}"
        )
        self.counts["generations"] += 1
        self.counts["tokens compared"] += tokens.numel()

    def _fail_midway(self, at: int) -> None:
        ids, way = self.asked[at]
        failing = LogitsProcessorList([FailsAtToken(self.rng.randint(1, 9))])
        try:
            generate(self.model, **ids, **way, logits_processor=failing)
        except StopHereError:
            self.counts["exceptions midway"] += 1
        else:
            raise AssertionError("the processor's exception was lost")


def generation_round(seed: int, seconds: float) -> Counter[str]:
    """Threads on simulated nodes under faults, or on this kernel."""
    rng = random.Random(seed)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny matrices
    try:
        ground = _simulated if rng.random() < 0.7 else _on_this_kernel
        return ground(rng, seconds)
    finally:
        torch.set_num_threads(before)


def _simulated(rng: random.Random, seconds: float) -> Counter[str]:
    session = simulated(NODE_BYTES)
    kernel = kernel_of(session)
    writers = [Writer(rng, session) for _ in range(THREADS)]
    kernel.fail_at_random(
        FAULTY, probability=0.01, seed=rng.getrandbits(32), code=rng.choice([1, 5, 12, 16])
    )
    with beside(others(kernel, rng.getrandbits(32), NODE_BYTES, LEFT_BYTES)):
        counts = write(writers, seconds)
    kernel.clear_faults()
    counts["faults injected"] += kernel.faults_fired
    check_against_kernel(session, [])
    check_returned(session)
    return counts


def _on_this_kernel(rng: random.Random, seconds: float) -> Counter[str]:
    session = Session.linux(limits={0: 512 * MIB})
    writers = [Writer(rng, session) for _ in range(THREADS)]
    with pressure(rng.getrandbits(32)):
        counts = write(writers, seconds)
    check_returned(session)
    return counts


def write(writers: list[Writer], seconds: float) -> Counter[str]:
    """Lets each writer step in a thread of its own; every one at least once."""
    until = time.monotonic() + seconds
    failures: list[BaseException] = []

    def work(writer: Writer) -> None:
        try:
            writer.step()
            while goes_on(until) and not failures:
                writer.step()
        except BaseException as error:  # reported by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(writer,)) for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return sum((writer.counts for writer in writers), Counter())
