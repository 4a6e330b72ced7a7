"""FlexGen as it is, on a machine without CUDA: the peer that tokens are compared with.

Run as a script, in a process of its own, because it changes torch for FlexGen's sake:
``python stock.py JOBS.json RESULT.npz``. JOBS has ``weights`` (the parent of a ``NAME-np`` folder),
``config`` (fields of FlexGen's OptConfig), ``offload_dir``, ``inputs``, ``gen_len`` and ``cases``:
a name and the positional fields of FlexGen's Policy, without the two compression configurations.
RESULT gets the tokens of every case under its name, and the seconds of every token beside them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers  # noqa: F401  before torch.cuda.Stream is replaced: it annotates with it


def stand_in_for_cuda() -> None:
    """Ordinary memory and the CPU for everything FlexGen asks of CUDA."""
    allocate = torch.empty

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return allocate(*size, **options)

    torch.cuda.Stream = type("Stream", (), {"__new__": lambda cls, *_: None})  # type: ignore[misc]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.set_device = lambda *_: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_: self  # type: ignore[method-assign, assignment]
    torch.Tensor.is_pinned = lambda self, *_: True  # type: ignore[method-assign, assignment]
    torch.empty = empty


def generate(jobs: dict[str, Any]) -> dict[str, Any]:
    from flexgen.compression import CompressionConfig
    from flexgen.flex_opt import OptLM, Policy
    from flexgen.opt_config import OptConfig
    from flexgen.pytorch_backend import DeviceType, TorchDevice, TorchDisk, TorchMixedDevice
    from flexgen.timer import timers
    from flexgen.utils import ExecutionEnv

    results = {}
    for name, fields in jobs["cases"].items():
        gpu = TorchDevice("cpu")
        gpu.device_type = DeviceType.CUDA
        cpu = TorchDevice("cpu")
        disk = TorchDisk(jobs["offload_dir"], num_copy_threads=1)
        env = ExecutionEnv(gpu=gpu, cpu=cpu, disk=disk, mixed=TorchMixedDevice([gpu, cpu, disk]))
        *fields, compress_weight, compress_cache = fields
        weights = CompressionConfig(num_bits=4, group_size=64, group_dim=0, symmetric=False)
        cache = CompressionConfig(num_bits=4, group_size=64, group_dim=2, symmetric=False)
        policy = Policy(*fields, compress_weight, weights, compress_cache, cache)
        model = OptLM(OptConfig(**jobs["config"]), env, jobs["weights"], policy)
        timers("generate").reset()
        results[name] = model.generate(np.array(jobs["inputs"]), max_new_tokens=jobs["gen_len"])
        results[f"{name} seconds"] = np.array(timers("generate").costs)
        env.close_copy_threads()
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    stand_in_for_cuda()
    np.savez(sys.argv[2], **generate(json.loads(Path(sys.argv[1]).read_text())))
