"""``cxl-offload vllm-flags``: the flags of ``vllm serve`` for a plan."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from cxl_offload.cli._advice import warn_of_advice


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("vllm-flags")(vllm_flags)


def vllm_flags(
    plan: Annotated[Path, typer.Argument(help="A plan.yaml of `cxl-offload plan inference`.")],
    long: Annotated[
        bool, typer.Option("--long", help="All of the KV cache's in --kv-transfer-config.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of them.")] = False,
) -> None:
    """Print the flags that put weights and KV cache where a plan says, ready for a shell.

    Example: cxl-offload vllm-flags plan.yaml
    """
    from cxl_offload.plan.plan_file import load_plan
    from cxl_offload.plan.vllm.flags import flags_of_plan

    found = load_plan(plan)
    flags = flags_of_plan(found, shape="long" if long else "short")
    warn_of_advice(found, plan, "its flags are")
    if as_json:
        print(json.dumps(flags))
        return
    if not flags:
        print("nothing leaves the GPU in this plan: no flags are needed", file=sys.stderr)
        return
    print(shlex.join(flags))
