"""What a generation on an accelerator copies, reads and computes, as events to be replayed.

Steps are those of :mod:`run_trace`. What is copied while a step computes is of that step, also
where the next one reads it: so the last step of a token has the first weights of the next token.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from cxl_offload.integrations.transformers.attention import AttentionCalls
from cxl_offload.integrations.transformers.growing_layers import GrowingStates
from cxl_offload.integrations.transformers.model_device import ModelDevice
from cxl_offload.integrations.transformers.parted_states import PartedStates
from cxl_offload.integrations.transformers.run_trace import (
    HIDDEN,
    WEIGHTS,
    RecordedLayer,
    RunTrace,
    scaled,
)
from cxl_offload.integrations.transformers.tier_states import TierStates
from cxl_offload.memory import NOT_FAULTED_IN, Session
from cxl_offload.plan.equations.experts import asked_share
from cxl_offload.plan.transformers.shares import KV
from cxl_offload.sim.trace import Engine

_QUEUES = {WEIGHTS: "load_weight", HIDDEN: "hidden"}


def recorder_for(
    session: Session,
    device: ModelDevice | None,
    calls: AttentionCalls,
    rows_at_once: int | None,
) -> RunTrace:
    """What records a run: on the accelerator, which then tells of its copies, or on CPUs."""
    if device is None:
        return RunTrace(session)
    made = AcceleratorTrace(session, calls, rows_at_once)
    device.told = made.copied
    return made


class AcceleratorTrace(RunTrace):
    """Collects events of a model that computes on an accelerator.

    Parameters
    ----------
    calls
        Say who attended in a layer.
    rows_at_once
        Rows that a layer computes at once; None: all.
    """

    def __init__(self, session: Session, calls: AttentionCalls, rows_at_once: int | None) -> None:
        super().__init__(session)
        self._calls, self._rows_at_once = calls, rows_at_once
        self._seen = (0, 0)
        self._coming: list[tuple[Engine, str, Mapping[int, int]]] = []
        self._follows = False

    @contextlib.contextmanager
    def following(self, model: PreTrainedModel, *, wanted: bool = True) -> Iterator[None]:
        """As of :class:`RunTrace`; copies outside of the block are not recorded."""
        self._follows, self._seen = wanted, self._attended()
        try:
            with super().following(model, wanted=wanted):
                yield
        finally:
            self._follows = False
            if self._coming:
                self._begin_step()

    def copied(self, engine: Engine, kind: str, host: torch.Tensor) -> None:
        """A copy was queued, of these bytes in host memory."""
        if self._follows:
            nodes = self._nodes(host) if kind == WEIGHTS else self._nodes_now(host)
            self._coming.append((engine, kind, nodes))

    def _begin_step(self) -> None:
        super()._begin_step()
        for engine, kind, nodes in self._coming:
            self._copy(_QUEUES[kind], engine, kind, nodes)
        self._coming.clear()

    def _copy(self, queue: str, engine: Engine, kind: str, nodes: Mapping[int, int]) -> None:
        moved = sum(nodes.values())
        into = engine == "d2h"
        read, write = ({}, nodes) if into else (nodes, {})
        if moved:
            self._add(queue, kind, engine=engine, read=read, write=write, accelerator_bytes=moved)

    def _multiplies(
        self, weights: Sequence[tuple[torch.Tensor, float]], rows: int, tokens: int
    ) -> None:
        """Every part of the rows reads, on the accelerator, the weights that it asks for."""
        self._multiplies_by(weights, rows, tokens, min(rows, self._rows_at_once or rows))

    def _beside(self, weights: list[torch.Tensor], given: Any, made: torch.Tensor) -> None:
        """In parts where it was given hidden states of a tier."""
        in_tier = bool(given) and isinstance(given[0], TierStates)
        rows, pairs = int(made.shape[0]), [(weight, 1.0) for weight in weights]
        tokens = made.numel() // max(rows * int(made.shape[-1]), 1)
        at_once = min(rows, self._rows_at_once or rows) if in_tier else rows
        self._multiplies_by(pairs, rows, tokens, at_once)

    def _multiplies_by(
        self,
        weights: Sequence[tuple[torch.Tensor, float]],
        rows: int,
        tokens: int,
        at_once: int,
    ) -> None:
        parts = math.ceil(rows / max(at_once, 1))
        nbytes = sum(w.nbytes * asked_share(asked, at_once * tokens) for w, asked in weights)
        flops = sum(2.0 * w.numel() * asked for w, asked in weights) * rows * tokens
        self._there(WEIGHTS, nbytes * parts, flops)

    def _looks_up(self, weight: torch.Tensor, made: torch.Tensor) -> None:
        """By CPUs where the table is in a tier; what they find crosses the link or stays there."""
        if self._session.find(weight.data_ptr()) is None:
            self._there(WEIGHTS, made.nbytes)
            return
        super()._looks_up(weight, made)
        if isinstance(made, TierStates):
            self._add(_QUEUES[HIDDEN], HIDDEN, write=self._nodes_now(made.host))
        else:
            self._copy(_QUEUES[HIDDEN], "h2d", HIDDEN, self._near(made.nbytes))

    def _attends(self, layer: RecordedLayer, cache: Any, states: torch.Tensor) -> None:
        kept = None if cache is None else cache.layers[layer.number]
        shown: tuple[Any, Any] = getattr(kept, "keys", None), getattr(kept, "values", None)
        before, self._seen = self._seen, self._attended()
        if kept is None or not isinstance(shown[0], torch.Tensor):
            return
        rows, tokens, positions = states.shape[0], states.shape[1], int(shown[0].shape[2])
        first = tokens > 1 and tokens >= positions
        seen = positions / 2 if first else positions
        flops = 4.0 * rows * tokens * seen * layer.query_width
        if not isinstance(kept, GrowingStates):
            self._there(KV, sum(each.nbytes for each in shown), flops)
            return
        parted = isinstance(shown[0], PartedStates)
        heads = [each.head for each in shown] if parted else []
        tails = [each.tail for each in shown] if parted else list(shown)
        there = sum(each.nbytes for each in heads)
        here = self._of_cache(kept, tails)
        by_cpu, joined = (now - then for now, then in zip(self._seen, before, strict=True))
        asked = rows * tokens * layer.query_width * states.dtype.itemsize
        if by_cpu:
            self._copy("compute", "d2h", HIDDEN, self._near(asked))
            share = int(tails[0].shape[2]) / max(positions, 1)
            self._add("compute", KV, read=here, flops=flops * share)
            self._copy("compute", "h2d", HIDDEN, self._near(asked))
            if joined:
                self._there(KV, there, flops * (1 - share))
        else:
            if not first:
                self._copy("load_cache", "h2d", KV, here)
            self._there(KV, there + (0 if first else sum(here.values())), flops)
        new = min(1.0, tokens / max(int(tails[0].shape[2]), 1))
        self._copy("store_cache", "d2h", KV, scaled(here, new))

    def _of_cache(self, kept: GrowingStates, shown: Sequence[torch.Tensor]) -> dict[int, int]:
        """Bytes on every node of what a layer sees of its cache in the tier."""
        found: Counter[int] = Counter()
        for part, whole in zip(shown, kept.kept_tensors(), strict=False):
            found.update(scaled(self._nodes(whole), part.nbytes / max(whole.nbytes, 1)))
        return dict(found)

    def _attended(self) -> tuple[int, int]:
        return self._calls.kernel, self._calls.joined

    def _there(self, kind: str, nbytes: float, flops: float = 0.0) -> None:
        """Work of the accelerator in its own memory."""
        self._add("compute", kind, engine="gpu", accelerator_bytes=round(nbytes), flops=flops)

    def _near(self, nbytes: int) -> dict[int, int]:
        """Ordinary memory of the CPUs that run this."""
        return {self._session.kernel.local_node: nbytes}

    def _nodes_now(self, tensor: torch.Tensor) -> Mapping[int, int]:
        """Of memory that is given back and taken again in a run."""
        found = self._session.bytes_per_node(tensor.data_ptr(), tensor.nbytes)
        return {node: count for node, count in found.items() if node != NOT_FAULTED_IN}
