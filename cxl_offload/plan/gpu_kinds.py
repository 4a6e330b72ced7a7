"""What the machine files know of kinds of GPUs, for GPUs that a machine has no such numbers of.

A discovered GPU has a model name and a link; its peaks stand in no file of the kernel. The machine
files have them of published machines, each with its source.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

from cxl_offload.errors import ConfigError
from cxl_offload.topology import Gpu, Machine, load_machine, machine_names
from cxl_offload.units import GB, GIB, format_bytes

_OTHER = re.compile(r"\b(?:LAPTOP|MAX-Q|MOBILE|NVL|MIG|4090 D)\b")
"""Words of models that share a name with a GPU of another memory and other clocks."""

_SIZES_ALIKE = 0.1
"""Share by which a size of the same kind may differ: the driver keeps some of it for itself."""

_DRIVERS_PART = 0.02
"""Share by which the memory of cards of one model differs in what their driver shows of it."""

_NUMBERS = ("memory_bytes", "memory_bandwidth_bytes_per_s", "peak_flops_per_s", "link")


@dataclass(frozen=True, slots=True)
class KnownGpu:
    """A GPU with its memory, peaks and link, and the machine file that has it."""

    gpu: Gpu
    machine: str


@functools.cache
def known_gpus() -> tuple[KnownGpu, ...]:
    """Those of the machine files, in the order of the files' names."""
    return tuple(
        KnownGpu(gpu, name)
        for name in machine_names()
        for gpu in load_machine(name).gpus
        if all(getattr(gpu, number) is not None for number in _NUMBERS)
    )


def kind_of(gpu: Gpu) -> KnownGpu | None:
    """The known GPU that is of the same kind: by its name in the model's, and by its memory.

    None where no machine file has it, or only with another size of memory; and for a GPU without a
    model, which is one of a machine file, whose numbers are its author's to give.
    """
    called = gpu.model.upper()
    if _OTHER.search(called):
        return None
    alike = [
        known
        for known in known_gpus()
        if re.search(rf"(?<![A-Z0-9]){re.escape(known.gpu.name.upper())}(?![A-Z0-9])", called)
        and _sizes_alike(gpu.memory_bytes, known.gpu)
    ]
    return max(alike, key=lambda known: len(_words(known.gpu) & _words(gpu)), default=None)


def _words(gpu: Gpu) -> set[str]:
    """Of a model's name, such as those of ``NVIDIA A100-SXM4-80GB``."""
    return set(re.findall(r"[A-Z0-9]+", gpu.model.upper()))


def _sizes_alike(nbytes: int | None, known: Gpu) -> bool:
    return nbytes is None or abs(nbytes - (known.memory_bytes or 0)) <= _SIZES_ALIKE * nbytes


def completed(gpu: Gpu) -> tuple[Gpu, str]:
    """The GPU with what it lacks as the machine files have it of its kind, and what was assumed.

    As it is, and nothing, where it lacks nothing or its kind is not known.
    """
    lacking = [number for number in _NUMBERS if getattr(gpu, number) is None]
    known = kind_of(gpu) if lacking else None
    if known is None:
        return gpu, ""
    made = replace(gpu, **{number: getattr(known.gpu, number) for number in lacking})
    said = {
        "memory_bytes": f"memory of {format_bytes(made.memory_bytes or 0)}",
        "memory_bandwidth_bytes_per_s": "memory bandwidth of "
        f"{(made.memory_bandwidth_bytes_per_s or 0) / GB:.4g} GB/s",
        "peak_flops_per_s": f"peak of {(made.peak_flops_per_s or 0) / 1e12:.4g} TFLOP/s",
        "link": "link",
    }
    what = ", ".join(said[number] for number in lacking)
    return made, (
        f"GPU {gpu.name} ({gpu.model}): {what} assumed, as of the "
        f"{known.gpu.model or known.gpu.name} of the machine file {known.machine}"
    )


def check_alike(machine: Machine, gpus: int) -> None:
    """Refuses a plan for several GPUs of a machine that are of different kinds.

    Plans take all to have the first one's memory and rates. Links and copies may differ: plans
    count those of each. What a GPU lacks, and its kind does not tell, is taken to be as the first
    one has it, and so are GPUs that the machine does not have.

    Parameters
    ----------
    gpus
        How many of the machine's, in its order, are planned for.

    Raises
    ------
    ConfigError
        Names the first GPU, the one that differs, and how many before it are alike.
    """
    for at, gpu in enumerate(machine.gpus[:gpus]):
        first = machine.gpus[0]
        unlike = _unlike(first, gpu)
        if unlike:
            what = " and ".join([*filter(None, [", ".join(unlike[:-1])]), unlike[-1]])
            ahead = "the first alone" if at == 1 else f"the first {at}, which are alike"
            raise ConfigError(
                f"--gpus {gpus}: {_called(first)} and {_called(gpu)} of {machine.name} differ in "
                f"{what}, and a plan takes all to be like the first; --gpus {at} plans for "
                f"{ahead}, and a machine file with only GPUs of one kind (--machine) for all of it"
            )


def _unlike(one: Gpu, other: Gpu) -> list[str]:
    """What two GPUs are known to differ in."""
    models = [each.model.upper() for each in (one, other)]
    unlike = ["model"] if all(models) and models[0] != models[1] else []
    if models[0] != models[1]:  # of one model, what the files of its kind say is no difference
        one, other = completed(one)[0], completed(other)[0]
    names = {"memory": "memory_bytes", "memory bandwidth": "memory_bandwidth_bytes_per_s"}
    for what, number in {**names, "peak": "peak_flops_per_s"}.items():
        mine, its = getattr(one, number), getattr(other, number)
        slack = _DRIVERS_PART * (mine or 0) if what == "memory" else 0
        if mine is not None and its is not None and abs(mine - its) > slack:
            unlike.append(what)
    return unlike


def _called(gpu: Gpu) -> str:
    """Name, model and memory, as far as they are known."""
    size = [] if gpu.memory_bytes is None else [format_bytes(gpu.memory_bytes)]
    known = ", ".join([gpu.model] * bool(gpu.model) + size)
    return f"GPU {gpu.name}" + (f" ({known})" if known else "")


def how_to_give_peaks(gpu: Gpu) -> str:
    """What to do about a GPU of a model that no machine file has; nothing for one without."""
    if not gpu.model:
        return ""
    names = ", ".join(dict.fromkeys(known.gpu.name for known in known_gpus()))
    size = "" if gpu.memory_bytes is None else f" with {gpu.memory_bytes / GIB:.4g} GiB"
    return (
        f", and no machine file knows {gpu.model}{size} (known are {names}); give memory, "
        "memory_bandwidth and peak_flops in a machine file, or plan as if it were another one "
        "(--gpu NAME)"
    )
