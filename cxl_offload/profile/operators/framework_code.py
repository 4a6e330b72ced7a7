"""Python code like that between a framework's calls of torch, to time the interpreter with.

No framework runs. The mix of instructions, calls and context managers is that of FlexGen's layers
(7 calls, 9 reads of attributes and 5 functions of Python per 100 instructions).
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch


class FrameworkCode:
    """What a framework's own code does between two calls of torch, in small."""

    def __init__(self) -> None:
        self._tensor = torch.zeros(2, 3, dtype=torch.float16)
        self._held: list[tuple[int, str] | None] = [None] * 8
        self._queues: dict[str, list[tuple[int, ...]]] = {"load": [], "store": []}
        self._names: list[str] = []
        self.count = 0

    @contextlib.contextmanager
    def _on(self, name: str) -> Iterator[None]:
        self._names.append(name)
        try:
            yield
        finally:
            self._names.pop()

    def _store(self, at: int, value: tuple[int, str]) -> None:
        self._held[at] = value

    def _take(self, at: int) -> tuple[int, str]:
        value, self._held[at] = self._held[at], None
        assert value is not None
        return value

    def _turn(self, name: str, *rest: int, keep: bool) -> tuple[int, ...]:
        queue = self._queues[name]
        if isinstance(rest[0], int) and keep:
            queue.append(rest)
        return queue.pop()

    def _move(self, at: int, name: str) -> int:
        with self._on(name):
            self._store(at, (at, name))
            turn = self._turn(name, at, keep=True)
            first, _ = self._take(at)
            rows, width = self._tensor.shape
            if self._tensor.device.type == "cpu" and self._tensor.data.dtype is torch.float16:
                first += rows * width
            self.count += len(turn) + first
        return self.count

    def work(self) -> None:
        """Few turns: code that is repeated is found in the caches."""
        self._move(0, "load")
        self._move(1, "store")

    def instructions(self) -> int:
        """How many instructions of the interpreter :meth:`work` takes.

        The garbage collector waits meanwhile: what others run when it collects is not this code.
        """
        counted = 0

        def count(frame: FrameType, event: str, _: object) -> Any:
            nonlocal counted
            frame.f_trace_opcodes = True
            counted += event == "opcode"
            return count

        before, collects = sys.gettrace(), gc.isenabled()
        gc.disable()
        sys.settrace(count)
        try:
            self.work()
        finally:
            sys.settrace(before)
            if collects:
                gc.enable()
        return counted


def copies_of_the_code(count: int) -> list[type[FrameworkCode]]:
    """The class, that often, each with instructions of its own in memory.

    A framework's layer runs thousands of different instructions: they are fetched again whenever a
    layer's weights had the caches, which one short piece of code would not be.
    """
    spec = importlib.util.find_spec(__name__)
    assert spec is not None
    assert spec.loader is not None
    made = []
    for _ in range(count):
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        made.append(module.FrameworkCode)
    return made
