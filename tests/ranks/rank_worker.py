"""The ranks of tests/ranks/test_ranks.py: each joins a gloo group and writes what it gets.

They are forked from one process, which has imported torch for all of them and begun no thread.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cxl_offload import load_machine
from cxl_offload.memory import Session
from cxl_offload.ranks import share_machine
from cxl_offload.topology import Machine


def fill(session: Session, node: int, share: int) -> int:
    """Takes a whole share of a node, sees that not one page more is given, and keeps it."""
    held = session.allocate(share, f"bind:{node}")
    try:
        session.allocate(4096, f"bind:{node}")
    except MemoryError:
        pass
    else:
        raise AssertionError(f"more than the share of node {node}")
    del held
    return session.stats().nodes[node].peak_bytes


def asked(machine: Machine | None, options: dict[str, Any], node: int | None) -> dict[str, object]:
    """What this rank gets, and has of ``node`` when all hold their shares; or the error."""
    for key in ("limits", "requests"):
        if key in options:
            options[key] = {
                int(name) if name.isdigit() else name: count for name, count in options[key].items()
            }
    try:
        share = share_machine(machine, **options)
    except ValueError as error:
        return {"error": str(error)}
    answer: dict[str, object] = {
        "local": [share.local_rank, share.local_size],
        "gpu": share.gpu,
        "home": share.home,
        "bytes": dict(share.node_bytes),
        "ldram": list(share.machine.tier("ldram").nodes),
    }
    if node is not None:
        dist.barrier()  # all hold their share at the same time
        answer["held"] = fill(share.session(), node, share.node_bytes[node])
    return answer


def run_rank(rank: int, args: argparse.Namespace) -> None:
    """Writes a line for each of the options to the file of this rank beside the store."""
    dist.init_process_group(
        "gloo", init_method=f"file://{args.store}", rank=rank, world_size=args.size
    )
    machine = load_machine(args.machine) if args.machine else None
    answers = []
    for options in json.loads(args.options):
        answers.append(json.dumps(asked(machine, options.get(str(rank), {}), args.fill)))
        dist.barrier()
    Path(f"{args.store}.{rank}").write_text("\n".join(answers))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--machine")
    parser.add_argument("--options", default="[{}]")
    parser.add_argument("--fill", type=int)
    args = parser.parse_args()
    ranks = set()
    for rank in range(args.size):
        if child := os.fork():
            ranks.add(child)
        else:
            run_rank(rank, args)
            return
    while ranks:
        ended, status = os.wait()
        ranks.remove(ended)
        if status:  # the others would wait for it
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


if __name__ == "__main__":
    main()
