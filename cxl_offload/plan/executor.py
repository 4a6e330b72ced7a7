"""What a framework contributes to planning: a search, and the homes of what it found."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Literal, TypeVar

from cxl_offload.plan.executor_rules import ExecutorName
from cxl_offload.plan.hardware import GPU, NVME, Hardware
from cxl_offload.plan.plan_file import Batch, ErrorEstimate, Home, PhaseEstimate, Serving
from cxl_offload.plan.planned_machine import as_planned
from cxl_offload.plan.replay_check import Replay
from cxl_offload.plan.request import PlanRequest
from cxl_offload.topology import Machine

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Generic[T]):
    """The best that a search found on some hardware.

    Attributes
    ----------
    choice
        In the executor's own terms.
    sequences
        Under way at once.
    host
        Bytes on every node, in the order of the hardware's.
    """

    hardware: Hardware
    choice: T
    tokens_per_s: float
    sequences: int
    host: tuple[int, ...]
    gpu_bytes: int
    drive_bytes: int = 0

    def bytes_on(self, tier: str) -> int:
        """Bytes on a tier, ``nvme`` included."""
        if tier == NVME:
            return self.drive_bytes
        nodes = zip(self.hardware.nodes, self.host, strict=True)
        return sum(nbytes for node, nbytes in nodes if node.tier == tier)


@dataclass(frozen=True, slots=True)
class KindBytes:
    """Where one kind of tensor is; ``policies`` are those of the host's part, one a node."""

    kind: str
    gpu: int
    host: Sequence[int]
    drive: int
    policies: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFields:
    """Fields of :class:`~cxl_offload.plan.plan_file.Plan` that only some executors fill.

    They have the same names and mean the same there; a field that is left out does not apply.
    """

    settings: dict[str, str] = field(default_factory=dict)
    threads: dict[int, int] = field(default_factory=dict)
    policies: dict[str, str] = field(default_factory=dict)
    on_cpu: tuple[str, ...] = ()
    kv_dtype: str = ""
    state_dtype: str = ""
    checkpointing: bool = False
    serving: Serving | None = None


class Executor(ABC, Generic[T]):
    """One framework with one request; everything else of planning is common to all."""

    kind: ClassVar[Literal["inference", "training"]] = "inference"
    name: ClassVar[ExecutorName]
    computes_on_cpu: ClassVar[bool] = True

    @property
    @abstractmethod
    def request(self) -> PlanRequest:
        """What is asked for."""

    @abstractmethod
    def search(
        self, hardware: Hardware, *, like: Candidate[T] | None = None
    ) -> Candidate[T] | None:
        """The candidate with the most tokens a second; None where nothing fits.

        ``like`` is a candidate for hardware that is no better: a place to begin.
        """

    @abstractmethod
    def why_nothing_fits(self, hardware: Hardware) -> str:
        """What is needed and what there is."""

    @abstractmethod
    def batch(self, found: Candidate[T]) -> Batch:
        """What is under way together."""

    @abstractmethod
    def kinds(self, found: Candidate[T]) -> Iterable[KindBytes]:
        """Homes of every kind of tensor."""

    @abstractmethod
    def command(self, found: Candidate[T]) -> tuple[str, ...]:
        """What runs the plan."""

    @abstractmethod
    def phases(self, found: Candidate[T]) -> tuple[PhaseEstimate, ...]:
        """Predicted seconds; the last phase is the one that repeats."""

    @abstractmethod
    def equation_seconds(self, found: Candidate[T]) -> Mapping[str, float]:
        """Predicted seconds under the names of the replay's phases."""

    @abstractmethod
    def replayed_seconds(self, found: Candidate[T], replay: Replay) -> Mapping[str, float]:
        """What a replay of the same bytes takes."""

    def hardware(self) -> Hardware:
        """What may be planned with."""
        return self.request.hardware()

    def machine(self, found: Candidate[T]) -> Machine:
        """What a replay runs on: the machine, with what was assumed where it has no number."""
        return as_planned(self.request.machine, found.hardware)

    def error(self) -> ErrorEstimate | None:
        """How far the equations are from published numbers of this executor; None: not known."""
        return None

    def refusal(self) -> str | None:
        """Why the executor does not run this model; the plan is advice then."""
        return None

    def own_fields(self, found: Candidate[T]) -> OwnFields:
        """What the plan says that not every executor has."""
        return OwnFields()

    def copied_bytes(self, found: Candidate[T]) -> int:
        """Bytes of weights beyond the first copy of each."""
        return 0

    def rate_with_one_socket(self) -> float:
        """Tokens/s of the best plan for the cores of one socket; 0 where it is not known."""
        return 0.0

    def why_no_copies(self, found: Candidate[T]) -> str:
        """Why copies of weights near the sockets are no faster."""
        return ""

    def other_homes(self, found: Candidate[T]) -> Iterable[tuple[str, Candidate[T] | None]]:
        """The best with one kind elsewhere, and what was done in words; None: it does not fit."""
        return ()

    def notes(self, found: Candidate[T]) -> list[str]:
        """What the reader must know."""
        return []


def homes(hardware: Hardware, kinds: Iterable[KindBytes]) -> tuple[Home, ...]:
    """The homes that have bytes."""
    made = []
    for each in kinds:
        total = each.gpu + sum(each.host) + each.drive
        parts = [(GPU, each.gpu, "")]
        for node, nbytes, policy in zip(hardware.nodes, each.host, each.policies, strict=True):
            parts.append((node.where, nbytes, policy))
        parts.append((NVME, each.drive, ""))
        for where, nbytes, policy in parts:
            if nbytes:
                percent = 100 * nbytes / total
                home = Home(
                    kind=each.kind, where=where, bytes=nbytes, percent=percent, policy=policy
                )
                made.append(home)
    return tuple(made)
