"""What a public model is: a name, the keys it knows, and a function of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cxl_offload.plan.machine_rates import MachineRates
from cxl_offload.topology import load_machine
from cxl_offload.validation.inputs import Inputs
from cxl_offload.validation.scoring import Predicted

HALF_PRECISION_BYTES = 2
"""Of a weight; gradients leave and parameters return so too."""

LLM_SHAPE = ("params", "layers", "width", "heads", "kv_heads")
"""Keys of ``llm``."""

LLM_KEYS = ("llm", "weight_bytes", "kv_bytes", "activation_bytes", "prompt_len", "gen_len")
"""Keys that describe a model, its element sizes and its lengths."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A prediction and what the reader must know about it."""

    value: Predicted
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PublicModel:
    """A model that cases name. ``system`` is a key of every model and not listed."""

    name: str
    keys: tuple[str, ...]
    answer: Callable[[Inputs], Answer]


def machine_name(inputs: Inputs) -> str:
    """The machine file that ``system`` names.

    Raises
    ------
    ValueError
        ``system`` is missing or ``none``: this model needs a machine.
    """
    name = inputs.text("system")
    if name == "none":
        raise ValueError("system = 'none', but this model needs a machine file")
    return name


def machine_numbers(inputs: Inputs) -> MachineRates:
    """The machine that ``system`` names.

    Raises
    ------
    ConfigError
        No such machine file.
    ValueError
        ``system`` is missing or ``none``: this model needs a machine.
    """
    return MachineRates(load_machine(machine_name(inputs)))
