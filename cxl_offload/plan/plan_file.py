"""A plan as frozen data, and the file it is kept in.

A plan names its executor and the command that realises it; every number in it is a prediction of
the equations, in bytes and seconds. ``plan.yaml`` is meant to be read, kept and handed on; it loads
back strictly, with file and line for anything that is wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import yaml

from cxl_offload.errors import ConfigError
from cxl_offload.files import (
    FieldError,
    bounds,
    check_numbers,
    decode_document,
    encode,
    read_document,
    read_text,
    write_text,
)
from cxl_offload.plan.executor_rules import ExecutorName, rules_of
from cxl_offload.topology.model import MOST_CPUS, TIER_NAMES

PLAN_VERSION = 1

OWN_FILE = "plan.yaml"
"""In a command: the file of the plan that it is in."""

_ACCELERATOR = "--accelerator"
_PERCENT_SLACK = 1e-3
_OWN_KEY = re.compile(r"\b(executor|homes|tokens_per_s)\b")
_FILE_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """FlexGen, transformers: GPU batch and number of them; DeepSpeed: micro-batch, accumulation.

    ``tokens`` are generated ones (inference) or those of a sequence (training).
    ``prompt`` is 0 in training only.
    """

    size: int = field(metadata=bounds(least=1))
    count: int = field(metadata=bounds(least=1))
    prompt: int
    tokens: int = field(metadata=bounds(least=1))

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where a part of one kind of tensor lives: ``gpu``, a tier's name or ``nvme``."""

    kind: str
    where: str
    bytes: int
    percent: float = field(metadata=bounds(most=100))
    policy: str = ""

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.where.partition(" ")[0] not in ("gpu", *TIER_NAMES):
            raise ValueError(f"where {self.where!r}: gpu, or one of {', '.join(TIER_NAMES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEstimate:
    """Predicted seconds of a phase and of everything in it that could be its bottleneck."""

    name: str
    seconds: float
    bottleneck: str
    terms: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_numbers(self)


def phase_estimate(name: str, seconds: float, terms: Mapping[str, float]) -> PhaseEstimate:
    """A phase whose bottleneck is the largest of its terms."""
    largest = max(terms, key=lambda term: terms[term])
    return PhaseEstimate(name=name, seconds=seconds, bottleneck=largest, terms=dict(terms))


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceEstimate:
    """Predicted gain in tokens/s for one more ``unit`` of ``what``."""

    what: str
    unit: str
    gain_tokens_per_s: float = field(metadata=bounds(least=-math.inf))

    def __post_init__(self) -> None:
        check_numbers(self)

    @property
    def brings_something(self) -> bool:
        """Whether the plan with one unit more is faster at all."""
        return self.gain_tokens_per_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CxlUse:
    """Whether the plan uses CXL memory and why; ``gain`` is a fraction of the speed without.

    ``gain`` is None where the machine has no CXL memory, or nothing runs without it.
    """

    used: bool
    gain: float | None = field(metadata=bounds(least=-1))
    reason: str

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What a request sees of a server that is never idle (predicted), in seconds.

    Attributes
    ----------
    first_token_s
        From its arrival, in the mean, where it need not wait for another to end: the rest of the
        step under way, and the steps of its prompt.
    alone_s
        The same on an idle server.
    per_token_s
        Between later tokens, in the mean.
    """

    first_token_s: float
    alone_s: float
    per_token_s: float

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesUse:
    """Whether weights have a copy near each socket and why; ``bytes`` are those beyond the first.

    ``gain`` is a fraction of the speed with one copy, be it for one socket; None where nothing fits
    with one.
    """

    used: bool
    gain: float | None = field(metadata=bounds(least=-1))
    bytes: int
    reason: str

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorEstimate:
    """How far the equations were from published measurements of the same kind.

    ``median`` and ``worst`` are of |predicted/published - 1| over ``cases`` cases.
    """

    cases: int = field(metadata=bounds(least=1))
    median: float
    worst: float
    source: str

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Batch, placement and the command for one model on one machine.

    Attributes
    ----------
    runs
        False: the plan is advice only, ``advice`` says why.
    command
        Program and arguments, as they are given to the executor; ``OWN_FILE`` stands for the file
        that this plan is kept in.
    node_bytes
        Host bytes on every NUMA node.
    settings
        What the executor reads from a file (DeepSpeed's JSON), by file name.
    threads
        CPU threads by the node that they read, as many as saturate it; empty where the executor
        decides.
    policies
        transformers: kind of tensor to the policy of its host memory, or ``gpu``.
    on_cpu
        transformers: kinds of weights that CPUs multiply where they lie, beside a GPU.
    kv_dtype
        transformers, vLLM: what keys and values are kept as; empty: what they are computed in.
    state_dtype
        DeepSpeed: what momentum and variance are kept as; empty: float32.
    checkpointing
        DeepSpeed: whether the backward computes the activations of every layer again; the hook of
        ``cxl-offload run`` has the model do so.
    copies
        Whether weights have a copy near each socket; None: one socket computes, or a GPU.
    serving
        vLLM: what a request sees; None: the executor runs batches, not a server.
    why
        What the next best placements would have cost (predicted), where that was asked for.
    """

    version: int = PLAN_VERSION
    kind: Literal["inference", "training"]
    executor: ExecutorName
    runs: bool
    advice: str = ""
    model: str
    machine: str
    command: tuple[str, ...]
    batch: Batch
    homes: tuple[Home, ...]
    node_bytes: dict[int, int]
    gpu_bytes: int
    drive_bytes: int = 0
    tokens_per_s: float
    phases: tuple[PhaseEstimate, ...]
    cxl: CxlUse
    prices: tuple[PriceEstimate, ...] = ()
    error: ErrorEstimate | None = None
    settings: dict[str, str] = field(default_factory=dict)
    threads: dict[int, int] = field(default_factory=dict, metadata=bounds(least=1, most=MOST_CPUS))
    policies: dict[str, str] = field(default_factory=dict)
    on_cpu: tuple[str, ...] = ()
    kv_dtype: str = ""
    state_dtype: str = ""
    checkpointing: bool = False
    copies: CopiesUse | None = None
    serving: Serving | None = None
    why: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.kind == "inference" and self.batch.prompt < 1:
            raise FieldError(f"must be at least 1, not {self.batch.prompt}", ("batch", "prompt"))
        rules = rules_of(self.executor)
        for rule in fields(rules):
            value, known = getattr(self, rule.name), getattr(rules, rule.name)
            if value and value not in known:
                takes = " or ".join(map(str, known)) or "none"
                raise ValueError(f"{rule.name} {value!r}: {self.executor} takes {takes}")
        for kind in self.on_cpu:
            if kind not in self.policies:
                raise ValueError(f"on_cpu {kind!r}: it is a kind that has a policy")
        if self.runs and not self.command:
            raise ValueError("a plan that runs needs a command")
        for name in self.settings:
            if name in (".", "..") or not _FILE_NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} in settings is the name of a file beside others, without a folder"
                )
        if not self.runs and not self.advice:
            raise ValueError("a plan that does not run needs the reason in 'advice'")
        for kind in {home.kind for home in self.homes}:
            total = sum(home.percent for home in self.homes if home.kind == kind)
            if abs(total - 100) > _PERCENT_SLACK:
                raise ValueError(f"homes of {kind} sum to {total:g} %, not 100")

    def command_in(self, path: str) -> tuple[str, ...]:
        """The command, with the path of the file that the plan is kept in."""
        return tuple(path if word == OWN_FILE else word for word in self.command)

    @property
    def accelerator(self) -> str | None:
        """What the command names to compute on; None: the CPUs."""
        return self._told(_ACCELERATOR)

    @property
    def dtype(self) -> str | None:
        """The type of weights that the command names, in which bytes are counted; None: none."""
        return self._told("--dtype")

    def _told(self, option: str) -> str | None:
        """What follows an option of the command."""
        words = iter(self.command)
        return next(words, None) if option in words else None

    def idle_resources(self) -> str:
        """Which resources bring nothing by one unit more, as a sentence; empty: there are none."""
        idle = [price for price in self.prices if not price.brings_something]
        if not idle:
            return ""
        units = " or ".join(dict.fromkeys(price.unit for price in idle))
        names = ", ".join(price.what for price in idle)
        of = "of any of these alone " if len(idle) > 1 else ""
        return f"One {units} more {of}brings nothing: {names}."

    def of(self, kind: str) -> Mapping[str, int]:
        """Bytes of one kind of tensor by home."""
        return {home.where: home.bytes for home in self.homes if home.kind == kind}


def plan_text(plan: Plan) -> str:
    """The YAML text of a plan."""
    head = (
        "# Made by cxl-offload plan. Bytes and seconds; every speed is predicted, none measured.\n"
    )
    if plan.policies:
        head += "# policies is what runs; homes, the bytes that follow from it, change nothing.\n"
    body = yaml.safe_dump(encode(plan), sort_keys=False, width=100, allow_unicode=True)
    return head + str(body)


def save_plan(plan: Plan, path: str | Path) -> None:
    """Writes a plan; a file of that name is replaced as a whole or not at all.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    write_text(path, plan_text(plan))


def load_plan(path: str | Path) -> Plan:
    """The plan of a file.

    Raises
    ------
    ConfigError
        With file, line and key, as :func:`parse_plan`, or the file cannot be read, or is of
        another kind.
    """
    text = read_text(path)
    if not _OWN_KEY.search(text):
        read_document(text, file=str(path))
        raise ConfigError(
            "this is no plan; `cxl-offload plan inference` and `plan training` write one "
            "(--output)",
            file=str(path),
        )
    return parse_plan(text, file=str(path))


def parse_plan(text: str, *, file: str) -> Plan:
    """The plan of a YAML text; ``file`` is for messages.

    Raises
    ------
    ConfigError
        With file and line: not YAML, another version, a key that is unknown, missing, twice there
        or of the wrong kind, percentages that do not sum to 100.
    """
    root = read_document(text, file=file)
    others = (name for name in Plan.__dataclass_fields__ if name != "version")
    entries = root.mapping(["version"], others)
    if entries["version"].text() != str(PLAN_VERSION):
        entries["version"].fail(
            f"plan version {entries['version'].text()}: this program reads {PLAN_VERSION}; "
            "plan again"
        )
    return decode_document(Plan, root)
