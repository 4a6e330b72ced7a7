"""Kinds of host tensors of ZeRO-Offload, and the policy of each; without torch or DeepSpeed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

from cxl_offload.errors import ConfigError
from cxl_offload.memory import (
    Interleave,
    Policy,
    PolicyLike,
    Preferred,
    Weighted,
    as_policy,
)
from cxl_offload.memory.policy import refuse_copies
from cxl_offload.plan.equations.activation_bytes import ACTIVATIONS
from cxl_offload.plan.plan_file import Plan, load_plan
from cxl_offload.topology import Machine

STREAMED = ("fp32_master", "fp32_grad", "exp_avg", "exp_avg_sq", "other_states")
"""What the CPU's optimizer reads and writes from end to end."""

COPIED = ("staging", "temp_grad", "grad_accumulation", "params", "other")
"""What is copied to and from the GPU: low-precision parameters and gradients. ``other`` is what
DeepSpeed pins elsewhere, e.g. ``engine.offload_states()``."""

KINDS = (*STREAMED, *COPIED)

_LIKE = {"temp_grad": "staging", "grad_accumulation": "staging", "other_states": "exp_avg"}
"""Kinds that a plan does not know, and whose place they share there."""

PlanOrPolicy: TypeAlias = Plan | PolicyLike | Mapping[str, PolicyLike] | Path | None


@dataclass(frozen=True, slots=True)
class KindPolicies:
    """The policy of every kind, and in words where it is from.

    ``state_dtype`` is what the plan counts on that momentum and variance are kept as; empty: it
    says nothing. ``checkpointing``: it counts on a backward that computes activations again, and
    that what is kept for it lies by the policy ``activations``; None: on the GPU.
    """

    by_kind: Mapping[str, Policy]
    source: str
    state_dtype: str = ""
    checkpointing: bool = False
    activations: Policy | None = None


def kind_policies(
    request: PlanOrPolicy, machine: Machine, *, gpu_node: int | None = None
) -> KindPolicies:
    """The policy of every kind.

    Parameters
    ----------
    request
        None for the defaults; a plan or the path of one; one policy for all kinds; or a mapping of
        kinds to policies, where kinds that are not named keep their default. Text is read by
        :func:`parse_request`.
    gpu_node
        The node of the GPU that this process trains on; None: that of its CPUs.

    Raises
    ------
    ConfigError
        The plan is for another executor, or cannot be read.
    ValueError, TypeError
        An unknown kind, or what is no policy on this machine.

    Notes
    -----
    Defaults: what the CPU streams is on the node of its CPUs and is not interleaved with CXL, which
    was 2 to 18 % slower (Wang et al., Performance Characterization of CXL Memory, IV-A); what the
    GPU copies is on the GPU's node. Where they are full the nearest node takes the rest, and the
    table says so.
    """
    streamed = Preferred((machine.initiator,))
    copied = streamed if gpu_node is None else Preferred((gpu_node,))
    policies: dict[str, Policy] = dict.fromkeys(STREAMED, streamed)
    policies |= dict.fromkeys(COPIED, copied)
    if isinstance(request, str):
        if not request.strip():
            raise ConfigError(
                f"{request!r} is no plan and no policy; leave it out for the defaults"
            )
        request = parse_request(request)
    if request is None:
        return KindPolicies(policies, "defaults")
    state_dtype, checkpointing, activations = "", False, None
    if isinstance(request, Path):
        request = load_plan(request)
    if isinstance(request, Plan):
        chosen: Mapping[str, PolicyLike] = _of_plan(request)
        source = f"plan of {request.model} on {request.machine}"
        state_dtype, checkpointing = request.state_dtype, request.checkpointing
        activations = _of_activations(request, machine)
    elif isinstance(request, Mapping) and all(isinstance(key, str) for key in request):
        chosen = cast("Mapping[str, PolicyLike]", request)
        source = "policies of the caller"
    else:
        one = cast("PolicyLike", request)
        chosen, source = dict.fromkeys(KINDS, one), "one policy of the caller"
    unknown = [kind for kind in chosen if kind not in KINDS]
    if unknown:
        raise ValueError(f"no kind {', '.join(unknown)} in ZeRO-Offload; kinds: {', '.join(KINDS)}")
    policies |= {kind: as_policy(each, machine) for kind, each in chosen.items()}
    for kind, policy in policies.items():
        refuse_copies(policy, f"{kind} of DeepSpeed")
    return KindPolicies(policies, source, state_dtype, checkpointing, activations)


def cxl_note(kind: str, policy: Policy, machine: Machine) -> str | None:
    """What is published about a kind that the CPU streams and a policy spreads over CXL memory."""
    nodes = policy.nodes if isinstance(policy, Interleave | Weighted) else ()
    tiers = {tier.name for node in nodes if (tier := machine.tier_of(node)) is not None}
    if kind not in STREAMED or len(nodes) < 2 or "cxl" not in tiers:
        return None
    return (
        "spread over CXL: published optimizers were 2 to 18 % slower so; it pays only where the "
        "measured profile says so (cxl-offload plan training)"
    )


def _of_plan(plan: Plan) -> dict[str, PolicyLike]:
    if plan.executor != "deepspeed":
        raise ConfigError(
            f"a plan for {plan.executor} cannot place DeepSpeed's tensors; "
            "make one with cxl-offload plan training"
        )
    chosen: dict[str, PolicyLike] = {
        home.kind: home.policy for home in plan.homes if home.policy and home.kind in KINDS
    }
    for kind, like in _LIKE.items():
        if like in chosen:
            chosen.setdefault(kind, chosen[like])
    return chosen


def _of_activations(plan: Plan, machine: Machine) -> Policy | None:
    """Where checkpoints of activations go; None: they stay on the GPU."""
    for home in plan.homes:
        if home.kind == ACTIVATIONS and home.policy:
            return as_policy(home.policy, machine)
    return None


def parse_request(text: str) -> PlanOrPolicy:
    """What ``CXL_OFFLOAD_PLAN`` says: a plan's file, or ``KIND=POLICY;KIND=POLICY``, or a policy.

    Raises
    ------
    ConfigError
        Neither; the text looks like a file and is none.
    """
    text = text.strip()
    if not text:
        return None
    if os.path.exists(text) or text.endswith((".yaml", ".yml")):
        return Path(text)
    parts = [part.strip() for part in text.split(";") if part.strip()]
    if parts and parts[0].partition("=")[0].strip() in KINDS:
        chosen: dict[str, PolicyLike] = {}
        for part in parts:
            kind, sign, policy = (each.strip() for each in part.partition("="))
            if not sign or not policy or kind in chosen:
                raise ConfigError(f"{part!r}: expected KIND=POLICY, each kind once, ';' between")
            chosen[kind] = policy
        return chosen
    if len(parts) > 1 or os.sep in text:
        raise ConfigError(
            f"{text!r} is neither a file nor KIND=POLICY;KIND=POLICY; kinds: {', '.join(KINDS)}"
        )
    return text
