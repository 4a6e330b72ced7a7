"""A step of all parameters of a model, whose tensors are many and mostly small.

Each tensor costs an optimizer some Python before anything is computed, which a single large one
does not show. Shapes are those of GPT-2; ``small`` is held by a large third cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.measurements import paired_ratio
from cxl_offload.ops.adam import CPUAdam

Shape = tuple[int, ...]


def gpt_shapes(layers: int, width: int, words: int, positions: int = 1024) -> list[Shape]:
    """Of the parameters of GPT-2, whose head is its embedding."""
    norm: list[Shape] = [(width,), (width,)]
    attention: list[Shape] = [(3 * width, width), (3 * width,), (width, width), (width,)]
    inner: list[Shape] = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(words, width), (positions, width), *layers * (norm * 2 + attention + inner), *norm]


MODELS = {"small": gpt_shapes(4, 192, 4000), "gpt2": gpt_shapes(12, 768, 50257)}

SHORT = {"small": 5}
"""How many times as many rounds a model has whose step takes milliseconds."""

Maker = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def model_makers(settings: Mapping[str, Any], threads: int, *, deepspeed: bool) -> dict[str, Maker]:
    """Name to what makes an optimizer of float32."""
    found: dict[str, Maker] = {
        "cxl_offload": lambda params: CPUAdam(params, threads=threads, **settings),
        "torch AdamW fused": lambda params: torch.optim.AdamW(params, fused=True, **settings),
    }
    if deepspeed:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        found["DeepSpeedCPUAdam"] = lambda params: DeepSpeedCPUAdam(params, **settings)
    return found


def parameters(shapes: list[Shape]) -> list[torch.nn.Parameter]:
    """The same ones in every call, with gradients."""
    source = torch.Generator().manual_seed(0)
    made = []
    for shape in shapes:
        param = torch.nn.Parameter(torch.empty(shape).normal_(0, 0.02, generator=source))
        param.grad = torch.empty(shape).normal_(0, 1e-3, generator=source)
        made.append(param)
    return made


def check_alike(made: Mapping[str, torch.optim.Optimizer]) -> None:
    """Three steps of each; ends the program where parameters differ by more than rounding."""
    first, *others = made
    for _ in range(3):
        for optimizer in made.values():
            optimizer.step()
    for other in others:
        groups = (made[name].param_groups[0]["params"] for name in (first, other))
        for ours, theirs in zip(*groups, strict=True):
            if not torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6):
                raise SystemExit(f"{first} and {other} differ after three steps of a model")


def run_model(
    shapes: list[Shape], made: Mapping[str, Maker], rounds: int, sample: Callable[..., float]
) -> dict[str, Any]:
    """Medians of a step in seconds, and how many times as fast this package's is.

    Parameters
    ----------
    sample
        Seconds of a step, after one that is not timed.
    """
    optimizers = {name: make(parameters(shapes)) for name, make in made.items()}
    check_alike(optimizers)
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    names = list(optimizers)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(sample(optimizers[name].step))
    ours = seconds["cxl_offload"]
    return {
        "tensors": len(shapes),
        "numel": sum(torch.Size(shape).numel() for shape in shapes),
        "seconds": seconds,
        "times_as_fast": {
            name: asdict(paired_ratio(took, ours))
            for name, took in seconds.items()
            if took is not ours
        },
    }


def show_model(name: str, found: Mapping[str, Any]) -> None:
    print(
        f"\n{name}: a step of {found['numel']} parameters in {found['tensors']} tensors (measured)"
    )
    for peer, taken in found["seconds"].items():
        line = f"  {peer:30s} {sorted(taken)[len(taken) // 2] * 1e3:8.2f} ms"
        ratio = found["times_as_fast"].get(peer)
        if ratio is not None:
            line += f"  {ratio['median']:.2f} ({ratio['low']:.2f} .. {ratio['high']:.2f})"
        print(line)
