"""The interpreter ends while a daemon thread is inside of the package: the process ends well."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import threading, time
import torch
import cxl_offload
from cxl_offload.ops.adam import adam_step
session = cxl_offload.Session.simulated(cxl_offload.load_machine("epyc9354-cxl-a"))
block = session.allocate(1 << 20, cxl_offload.Bind((0,)))
states = [torch.rand(1 << 19) for _ in range(4)]
def move():
    for node in (2, 0):
        session.move(block, cxl_offload.Bind((node,)))
# In place: a thread that is inside of torch's allocator at the end dies by torch's own fault.
update = lambda: adam_step(*states, step=1, lr=1e-3)
work = {"move": move, "update": update}[%r]
def forever():
    while True:
        work()
threading.Thread(target=forever, daemon=True).start()
time.sleep(0.3)
"""


@pytest.mark.parametrize("work", ["move", "update"])
def test_daemon_thread_does_not_end_the_process_by_a_signal(work: str) -> None:
    command = [sys.executable, "-c", PROGRAM % work]
    for _ in range(2):
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 0, ended.stderr[-2000:]
