"""Flags of ``vllm serve`` that realise a plan: how much leaves the GPU, and the nodes that take it.

Both are read by this package's plugin of vLLM (docs/vllm.md). Nothing here knows vLLM.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

from cxl_offload.errors import ConfigError
from cxl_offload.plan.gpu import MOST_GPUS
from cxl_offload.plan.hardware import GPU
from cxl_offload.plan.plan_file import Plan
from cxl_offload.renamed import old_names
from cxl_offload.topology.model import MAX_WEIGHT
from cxl_offload.units import GIB

Shape = Literal["short", "long"]
"""``--kv-offloading-size`` with what it leaves open, or all of it in ``--kv-transfer-config``."""

WEIGHTS, KV = "weights", "kv evicted"
"""Kinds of a plan's homes; those on the GPU need no flag."""

PARALLEL = "--tensor-parallel-size"

_SPEC = {"spec_name": "cxl"}
_SPEC_MODULE = {
    "spec_name": "CxlOffloadingSpec",
    "spec_module_path": "cxl_offload.integrations.vllm.kv_spec",
}
_FEWEST_SLACK, _MOST_SLACK = 1 << 20, 16 << 20
"""Added to ``--cpu-offload-gb``, which counts whole pages: 4 KiB at most for a parameter, of which
a layer has about ten. Less than a matrix of a layer of any model that is worth offloading."""


def policy_of_bytes(shares: Mapping[str, int]) -> str:
    """A policy that gives every node (or tier) its bytes, spread over each allocation.

    Parameters
    ----------
    shares
        Node id or name of a tier to bytes; none is 0.
    """
    if len(shares) == 1:
        return f"bind:{next(iter(shares))}"
    unit = math.gcd(*shares.values())
    weights = {name: count // unit for name, count in shares.items()}
    most = max(weights.values())
    if most > MAX_WEIGHT:
        weights = {
            name: max(1, round(weight * MAX_WEIGHT / most)) for name, weight in weights.items()
        }
    return "weighted:" + ",".join(f"{name}={weight}" for name, weight in weights.items())


def offload_flags(
    weights: Mapping[str, int], kv: Mapping[str, int], *, shape: Shape = "short", gpus: int = 1
) -> tuple[str, ...]:
    """Flags that put weights and KV where they are planned.

    Parameters
    ----------
    weights, kv
        Node id or name of a tier to bytes there; both may be empty.
    shape
        Of the flags for KV; the weights have one only.
    gpus
        That share the model: ``--cpu-offload-gb`` is of each, the size of the KV tier of all.

    Returns
    -------
    tuple of str
        Arguments, not quoted for a shell; empty when all stays on the GPU.
    """
    made: list[str] = [] if gpus == 1 else [PARALLEL, str(gpus)]
    weights = {name: count for name, count in weights.items() if count}
    kv = {name: count for name, count in kv.items() if count}
    if weights:
        total = -(-sum(weights.values()) // gpus)
        slack = min(max(total // 1024, _FEWEST_SLACK), _MOST_SLACK)
        size = math.ceil((total + slack) / GIB * 1e4) / 1e4
        section = {"weight_policy": policy_of_bytes(weights)}
        made += ["--cpu-offload-gb", f"{size:.4f}"]
        made += ["--additional-config", _json({"cxl_offload": section})]
    if kv:
        made += _kv_flags(sum(kv.values()), policy_of_bytes(kv), shape)
    return tuple(made)


def _kv_flags(nbytes: int, policy: str, shape: Shape) -> list[str]:
    if shape == "short":
        extra = {"kv_connector_extra_config": {**_SPEC, "policy": policy}}
        size = f"{nbytes / GIB:.6f}".rstrip("0").rstrip(".")
        return ["--kv-offloading-size", size, "--kv-transfer-config", _json(extra)]
    whole = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            **_SPEC_MODULE,
            "cpu_bytes_to_use": nbytes,
            "policy": policy,
        },
    }
    return ["--kv-transfer-config", _json(whole)]


def flags_of_plan(plan: Plan, *, shape: Shape = "short") -> tuple[str, ...]:
    """The flags of a plan that was kept in a file.

    Raises
    ------
    ConfigError
        The plan is for another executor, or a home of it has no policy of one node.
    """
    if plan.executor != "vllm":
        raise ConfigError(f"vllm-flags: the plan is for {plan.executor}; plan with --executor vllm")
    shares: dict[str, dict[str, int]] = {WEIGHTS: {}, KV: {}}
    for home in plan.homes:
        if home.kind not in shares or home.where == GPU or not home.bytes:
            continue
        kind, colon, node = home.policy.partition(":")
        if kind != "bind" or not colon or "," in node:
            raise ConfigError(
                f"vllm-flags: home of {home.kind} on {home.where} has policy {home.policy!r}; "
                "expected one node, such as 'bind:2'"
            )
        shares[home.kind][node] = shares[home.kind].get(node, 0) + home.bytes
    return offload_flags(shares[WEIGHTS], shares[KV], shape=shape, gpus=_gpus_of(plan))


def _gpus_of(plan: Plan) -> int:
    """As the plan's own command says."""
    if PARALLEL not in plan.command[:-1]:
        return 1
    count = plan.command[plan.command.index(PARALLEL) + 1]
    if not count.isdecimal() or not 1 <= int(count[:6]) <= MOST_GPUS:
        raise ConfigError(f"vllm-flags: the plan's command has {PARALLEL} {count[:20]!r}")
    return int(count)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


__getattr__ = old_names(__name__)
