"""One rank of test_ranks.py: models that transformers divides, with their parts in tiers."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from cxl_offload import load_machine
from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import load, offload
from cxl_offload.memory import Session
from cxl_offload.ops.view import local_tensor
from cxl_offload.ranks import joined_group, share_machine

from .models import ONLY_EAGER, generate

POLICIES = {"kv": "cxl", "attention": "bind:1", "mlp": "bind:1", "experts": "bind:1"}


def nodes_of(session: Session, tensor: torch.Tensor) -> set[int]:
    local = local_tensor(tensor)
    return set(session.bytes_per_node(local.data_ptr(), local.nbytes))


def of_family(folder: Path, family: str, session: Session) -> dict[str, Any]:
    """Tokens of one process, and of all with the model loaded to its place, and moved there."""
    options = {"attn_implementation": "eager" if family in ONLY_EAGER else "sdpa"}
    whole = AutoModelForCausalLM.from_pretrained(folder / family, **options).eval()
    expected = generate(whole)
    divided = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    said: dict[str, Any] = {}
    model = load(folder / family, POLICIES, distributed=divided, session=session)
    parts = {name: weight for name, weight in model.named_parameters() if "layers.0" in name}
    placed = {
        name: weight for name, weight in parts.items() if "proj" in name and "experts" not in name
    }
    said["divided"] = any(
        local_tensor(weight).numel() < weight.numel() for weight in placed.values()
    )
    said["loaded"] = sorted(set().union(*(nodes_of(session, each) for each in placed.values())))
    with offload(model, POLICIES, session=session) as done:
        said["loaded_equal"] = torch.equal(generate(model), expected)
        said["calls"] = [done.calls.kernel, sum(done.calls.own.values())]
        said["kv"] = done.store.use()["kv", "host"].granted
    del model, parts, placed
    moved = AutoModelForCausalLM.from_pretrained(
        folder / family, distributed_config=divided, **options
    ).eval()
    first = next(w for n, w in moved.named_parameters() if "q_proj" in n or "qkv" in n)
    with offload(moved, POLICIES, rows_at_once=2, session=session):
        said["moved"] = sorted(nodes_of(session, first))
        said["moved_equal"] = torch.equal(generate(moved), expected)
    said["back"] = session.find(local_tensor(first).data_ptr()) is None
    return said


def numbered_experts(folder: Path, session: Session) -> str:
    """What is said to experts by number where no rank has all of them."""
    divided = DistributedConfig(tp_size=2, ep_size=2)
    policies = {**POLICIES, "experts:0": "cxl"}
    try:
        load(folder / "qwen3-moe", policies, distributed=divided, session=session)
    except ConfigError as error:
        return str(error)
    return ""


def main() -> None:
    folder, families = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    with joined_group():
        session = share_machine(load_machine("spr3-h100")).session()
        answer: dict[str, Any] = {}
        for family in families:
            answer[family] = of_family(folder, family, session)
        answer["numbered"] = numbered_experts(folder, session)
        dist.barrier()
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None
