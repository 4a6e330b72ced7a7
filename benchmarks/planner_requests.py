"""Whole plans, prices and replay included, that are timed: every shipped machine and model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cxl_offload.plan.flexgen.plan import InferenceRequest, plan_inference
from cxl_offload.plan.model.config import ModelConfig
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import Plan
from cxl_offload.plan.training.plan import TrainingRequest, plan_training
from cxl_offload.plan.transformers.plan import TransformersRequest, plan_transformers
from cxl_offload.plan.vllm.plan import VllmRequest, plan_vllm
from cxl_offload.plan.what_if import with_memory
from cxl_offload.topology import Machine, load_machine

CONFIGS = Path(__file__).parents[1] / "configs"
LENGTHS = ((512, 32), (32, 128))
"""Tokens of a prompt, tokens to generate; of a training the batch and the tokens of a sequence."""
TRAININGS = ((16, 1024), (4, 512))
GROWN = ("epyc9354-cxl-a", "spr3-h100", "xeon6430")
"""Machines that CXL nodes are added to; the last has no GPU."""
NODES = (8, 12)

Planned = Callable[[ModelConfig, Machine, tuple[int, int]], Plan]


def _flexgen(model: ModelConfig, machine: Machine, lengths: tuple[int, int]) -> Plan:
    return plan_inference(InferenceRequest(**_asked(model, machine, lengths)))


def _stock(model: ModelConfig, machine: Machine, lengths: tuple[int, int]) -> Plan:
    return plan_inference(InferenceRequest(**_asked(model, machine, lengths), engine="stock"))


def _transformers(model: ModelConfig, machine: Machine, lengths: tuple[int, int]) -> Plan:
    return plan_transformers(TransformersRequest(**_asked(model, machine, lengths)))


def _vllm(model: ModelConfig, machine: Machine, lengths: tuple[int, int]) -> Plan:
    return plan_vllm(VllmRequest(**_asked(model, machine, lengths)))


def _training(model: ModelConfig, machine: Machine, lengths: tuple[int, int]) -> Plan:
    batch, tokens = lengths
    return plan_training(TrainingRequest(model=model, machine=machine, batch=batch, tokens=tokens))


def _asked(model: ModelConfig, machine: Machine, lengths: tuple[int, int]) -> dict[str, Any]:
    prompt, generated = lengths
    named = {"model": model, "machine": machine, "model_name": model.name}
    return {**named, "prompt": prompt, "generated": generated}


EXECUTORS: dict[str, Planned] = {
    "flexgen": _flexgen,
    "flexgen-stock": _stock,
    "transformers": _transformers,
    "vllm": _vllm,
    "training": _training,
}
AUTO = ("flexgen", "transformers", "vllm")
"""What ``--executor auto`` plans for, one after the other."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A plan that was made, and the CPU time of it; other processes do not count."""

    machine: str
    model: str
    executor: str
    lengths: tuple[int, int]
    cpu_s: float

    @property
    def request(self) -> str:
        """In words."""
        first, second = self.lengths
        sign = "x" if self.executor == "training" else "+"
        return f"{self.executor} {self.model} on {self.machine}, {first} {sign} {second}"


def names(folder: str) -> list[str]:
    """Shipped machines or models."""
    return sorted(path.stem for path in (CONFIGS / folder).glob("*.yaml"))


def of_nodes(name: str, nodes: int) -> Machine:
    """A shipped machine with CXL nodes of several sizes and rates, up to so many nodes."""
    machine = load_machine(name)
    for at in range(nodes - len(machine.nodes)):
        machine = with_memory(machine, f"cxl={32 + 8 * at}GiB:{20 + 3 * at}GB/s:{250 + 10 * at}ns")
    return machine


def machines(*, shipped: bool) -> Iterator[tuple[str, Machine]]:
    """Those with added nodes by default, and with ``shipped`` all others too."""
    for name in names("machines") if shipped else ():
        yield name, load_machine(name)
    for name in GROWN:
        for nodes in NODES:
            yield f"{name} of {nodes} nodes", of_nodes(name, nodes)


def timed_plans(*, shipped: bool) -> Iterator[Timed]:
    """Every plan that is not refused, once; those of ``auto`` as the sum of its executors."""
    models = [(name, load_model(name)) for name in names("models")]
    for machine_name, machine in machines(shipped=shipped):
        for model_name, model in models:
            for at in range(len(LENGTHS)):
                made = []
                for executor, plan in EXECUTORS.items():
                    lengths = (TRAININGS if executor == "training" else LENGTHS)[at]
                    spent = _seconds(lambda: plan(model, machine, lengths))  # noqa: B023
                    if spent is not None:
                        made.append(Timed(machine_name, model_name, executor, lengths, spent))
                yield from made
                together = [each.cpu_s for each in made if each.executor in AUTO]
                if len(together) > 1:
                    yield Timed(machine_name, model_name, "auto", LENGTHS[at], sum(together))


def _seconds(plan: Callable[[], Plan]) -> float | None:
    """CPU seconds of this process; None where nothing fits, or the request is refused."""
    started = time.process_time()
    try:
        plan()
    except (MemoryError, ValueError):
        return None
    return time.process_time() - started
