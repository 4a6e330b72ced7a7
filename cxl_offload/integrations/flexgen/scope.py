"""FlexGen's module globals, replaced for the length of one run and put back.

FlexGen reads ``general_copy``, ``init_weight_list``, ``torch`` and ``F`` from its modules' globals.
Replacing those is how its code calls ours while the package, and torch itself, stay untouched.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import flexgen.compression
import flexgen.flex_opt
import flexgen.pytorch_backend
import torch
from flexgen.timer import timers

_one_run = threading.Lock()


@contextlib.contextmanager
def replaced(module: ModuleType, **values: Any) -> Iterator[None]:
    """Globals of ``module`` have other values inside."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


class _NoStreams:
    """``torch.cuda`` for a machine without CUDA: everything is in order and done at once."""

    class Stream:
        """The only stream there is."""

    @staticmethod
    def stream(_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @staticmethod
    def synchronize(*_: Any) -> None:
        """Nothing is under way."""


class TorchWithoutCuda:
    """torch as FlexGen's modules see it where the host is the accelerator."""

    cuda = _NoStreams

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def flexgen_globals(
    *, copy: Any, init_weight_list: Any, self_attention: Any, functional: Any, without_cuda: bool
) -> Iterator[None]:
    """One run's copies, weight homes, attention layers and functions in FlexGen's modules.

    FlexGen also keeps the last devices and its timers in globals; they are put back too, so that a
    run leaves nothing alive.

    Raises
    ------
    RuntimeError
        Another run is under way in this process.
    """
    if not _one_run.acquire(blocking=False):
        raise RuntimeError(
            "another FlexGen run is under way in this process; FlexGen keeps its state in module "
            "globals, so run them one after another or in processes of their own"
        )
    backend = flexgen.pytorch_backend
    seen = {"torch": TorchWithoutCuda()} if without_cuda else {}
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                replaced(
                    flexgen.flex_opt,
                    general_copy=copy,
                    init_weight_list=init_weight_list,
                    SelfAttention=self_attention,
                )
            )
            stack.enter_context(replaced(flexgen.flex_opt, **seen))
            stack.enter_context(replaced(backend, F=functional))
            stack.enter_context(replaced(flexgen.compression, general_copy=copy))
            stack.enter_context(
                replaced(
                    backend,
                    general_copy=copy,
                    global_cpu_device=backend.global_cpu_device,
                    global_disk_device=backend.global_disk_device,
                )
            )
            timers("generate").reset()
            yield
    finally:
        timers("generate").reset()
        _one_run.release()
