"""One rank of tests/ranks/test_ranks.py: joins a real gloo group and says what it got."""

from __future__ import annotations

import argparse
import json
import sys

import torch.distributed as dist

from cxl_offload import load_machine
from cxl_offload.memory import Session
from cxl_offload.ranks import share_machine


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--machine")
    parser.add_argument("--options", default="{}")
    parser.add_argument("--fill", type=int)
    args = parser.parse_args()
    dist.init_process_group(
        "gloo", init_method=f"file://{args.store}", rank=args.rank, world_size=args.size
    )
    options = json.loads(args.options).get(str(args.rank), {})
    for key in ("capacities", "requests"):
        if key in options:
            options[key] = {
                int(node) if node.isdigit() else node: count for node, count in options[key].items()
            }
    machine = load_machine(args.machine) if args.machine else None
    answer: dict[str, object] = {}
    try:
        share = share_machine(machine, **options)
    except ValueError as error:
        answer = {"error": str(error)}
    else:
        answer = {
            "local": [share.local_rank, share.local_size],
            "gpu": share.gpu,
            "home": share.home,
            "bytes": dict(share.node_bytes),
            "ldram": list(share.machine.tier("ldram").nodes),
        }
        if args.fill is not None:
            dist.barrier()  # all hold their share at the same time
            answer["held"] = fill(share.session(), args.fill, share.node_bytes[args.fill])
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
