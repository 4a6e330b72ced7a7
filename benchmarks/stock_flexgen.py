"""FlexGen as it is, on a machine without CUDA: the peer that tokens and times are compared with.

A process of its own, because it changes torch for FlexGen's sake: ``python -m
benchmarks.stock_flexgen JOBS.json``. JOBS has ``weights`` (the parent of a ``NAME-np`` folder),
``config`` (fields of FlexGen's OptConfig), ``offload_dir``, ``threads`` and ``cases``: a name and
its ``inputs``, ``gen_len``, ``policy`` (the positional fields of FlexGen's Policy, without the two
compression configurations) and, optionally, ``skip_prompt``. Every line on stdin names a case to
run; every line on stdout is a JSON object with its ``tokens`` and the ``seconds`` of every token,
the prompt's first. It ends with 1, and a traceback on stderr, when a case fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
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

    torch.cuda.Stream = type("Stream", (), {"__new__": lambda cls, *_: None})  # type: ignore
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.set_device = lambda *_: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_: self  # type: ignore[method-assign, assignment]
    torch.Tensor.is_pinned = lambda self, *_: True  # type: ignore[method-assign, assignment]
    torch.empty = empty  # type: ignore[assignment]


class Stock:
    """Generates the cases of JOBS with models that stay loaded from one case to the next."""

    def __init__(self, jobs: dict[str, Any]) -> None:
        self._jobs = jobs
        self._models: dict[str, Any] = {}

    def run(self, name: str) -> dict[str, Any]:
        """Tokens and seconds of one case."""
        from flexgen.timer import timers

        case = self._jobs["cases"][name]
        if name not in self._models:
            self._models[name] = self._load(case["policy"])
        timers("generate").reset()
        inputs = np.array(case["inputs"])
        with self._shortcut(case):
            tokens = self._models[name].generate(inputs, max_new_tokens=case["gen_len"])
        return {"tokens": tokens.tolist(), "seconds": timers("generate").costs}

    @staticmethod
    def _shortcut(case: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
        if not case.get("skip_prompt"):
            return contextlib.nullcontext()
        from benchmarks.skipped_prompt import skipped_prompt

        return skipped_prompt()

    def _load(self, fields: list[Any]) -> Any:
        from flexgen.compression import CompressionConfig
        from flexgen.flex_opt import OptLM, Policy
        from flexgen.opt_config import OptConfig
        from flexgen.pytorch_backend import DeviceType, TorchDevice, TorchDisk, TorchMixedDevice
        from flexgen.utils import ExecutionEnv

        gpu = TorchDevice("cpu")
        gpu.device_type = DeviceType.CUDA
        cpu = TorchDevice("cpu")
        disk = TorchDisk(self._jobs["offload_dir"], num_copy_threads=1)
        env = ExecutionEnv(gpu=gpu, cpu=cpu, disk=disk, mixed=TorchMixedDevice([gpu, cpu, disk]))
        *plain, compress_weight, compress_cache = fields
        weights = CompressionConfig(num_bits=4, group_size=64, group_dim=0, symmetric=False)
        cache = CompressionConfig(num_bits=4, group_size=64, group_dim=2, symmetric=False)
        policy = Policy(*plain, compress_weight, weights, compress_cache, cache)
        return OptLM(OptConfig(**self._jobs["config"]), env, self._jobs["weights"], policy)


def main(path: Path) -> None:
    """Runs the cases that stdin names until it ends."""
    jobs = json.loads(path.read_text())
    torch.set_num_threads(jobs["threads"])
    stand_in_for_cuda()
    stock = Stock(jobs)
    # FlexGen prints on stdout; only results go there.
    results, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(stock.run(line.strip())), file=results, flush=True)


if __name__ == "__main__":
    status = 0
    try:
        main(Path(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)  # its copy threads never end by themselves: who waits for it would hang
