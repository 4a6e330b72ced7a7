"""What runs a plan for FlexGen: the policies of its homes, and the command.

The cuts themselves are the bytes of the plan's homes: the integration looks up which cut of the
weights, and how many whole sequences, they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from cxl_offload.core import BASE_PAGE_BYTES
from cxl_offload.plan.flexgen.choice import Choice, Stripe, kv_granule, weight_granule
from cxl_offload.plan.flexgen.job import FlexGenJob
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.plan_file import OWN_FILE
from cxl_offload.renamed import old_names


def policies_of(
    job: FlexGenJob, hardware: Hardware, choice: Choice
) -> Mapping[str, tuple[str, ...]]:
    """The policy of every kind of tensor on every tier of the hardware."""
    alone = tuple(f"bind:{name}" for name in hardware.names)
    striped = {
        "weights": (choice.weight_stripe, weight_granule),
        "kv": (choice.kv_stripe, kv_granule),
    }
    made = dict.fromkeys(("weights", "kv", "act", "workspace"), alone)
    for kind, (stripe, granule_of) in striped.items():
        if stripe is not None:
            policy = _stripe_policy(hardware, stripe, granule_of(job, stripe) or BASE_PAGE_BYTES)
            made[kind] = (policy,) * len(alone)
    return made


def _stripe_policy(hardware: Hardware, stripe: Stripe, granule_bytes: int) -> str:
    common = math.gcd(*stripe)
    shares = ",".join(
        f"{name}={weight // common}"
        for name, weight in zip(hardware.names, stripe, strict=True)
        if weight
    )
    return f"weighted:{shares}@{granule_bytes // 1024}KiB"


def command_of(model: str, *, machine: str | None, path: str | None) -> tuple[str, ...]:
    """The command that runs a plan; ``OWN_FILE`` stands for the plan's file."""
    made = ["cxl-offload", "flexgen", "--plan", OWN_FILE, "--model", model]
    if path is not None:
        made += ["--path", path]
    if machine is not None:
        made += ["--machine", machine]
    return tuple(made)


__getattr__ = old_names(__name__)
