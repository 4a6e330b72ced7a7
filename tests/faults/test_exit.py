"""The interpreter ends while a daemon thread is inside of the package: the process ends well."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Importing takes longest, so processes are forked after it; nothing of OpenMP runs before.
PROGRAM = """
import json, os, sys, threading, time
import torch
import cxl_offload
from cxl_offload.ops.adam import adam_step

machine = cxl_offload.load_machine("epyc9354-cxl-a")

def moving():
    session = cxl_offload.Session.simulated(machine)
    block = session.allocate(1 << 20, cxl_offload.Bind((0,)))
    return lambda: [session.move(block, cxl_offload.Bind((node,))) for node in (2, 0)]

def updating():
    # In place: a thread that is inside of torch's allocator at the end dies by torch's own fault.
    states = [torch.rand(1 << 19) for _ in range(4)]
    return lambda: adam_step(*states, step=1, lr=1e-3)

def killed():
    return lambda: os.kill(os.getpid(), 9)

def forever(work):
    while True:
        work()

makers = {"move": moving, "update": updating, "killed": killed}
children = {}
for name in sys.argv[1:]:
    if child := os.fork():
        children[child] = name
        continue
    threading.Thread(target=forever, args=(makers[name](),), daemon=True).start()
    time.sleep(0.3)
    break
else:
    codes = {child: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
    ended = [(name, codes[child]) for child, name in children.items()]
    print(json.dumps(ended))
"""


@pytest.mark.slow(reason="ends five processes that have loaded torch")
@pytest.mark.timeout(600)
def test_daemon_thread_does_not_end_the_process_by_a_signal() -> None:
    """The last one is the control: the signal that ends it is seen."""
    works = ["move", "update"] * 2 + ["killed"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *works], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ended = [tuple(each) for each in json.loads(done.stdout)]
    assert ended == [(work, 0) for work in works[:-1]] + [("killed", -9)], done.stderr[-2000:]
