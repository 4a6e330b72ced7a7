"""Flags of ``vllm serve`` that realise a plan: how much leaves the GPU, and the nodes that take it.

Both are read by this package's plugin of vLLM (docs/vllm.md). Nothing here knows vLLM.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cxl_offload.errors import ConfigError
from cxl_offload.plan.plan_file import Plan
from cxl_offload.units import GIB

__all__ = [
    "GPU",
    "KV",
    "WEIGHTS",
    "HostShares",
    "Shape",
    "flags_of_plan",
    "offload_flags",
    "placement_text",
]

Shape = Literal["short", "long"]
"""``--kv-offloading-size`` with what it leaves open, or all of it in ``--kv-transfer-config``."""

WEIGHTS, KV, GPU = "weights", "kv evicted", "gpu"
"""Kinds of a plan's homes, and the home that needs no flag."""

COLD = "cold kv"
_CXL = "cxl"

_SPEC = {"spec_name": "cxl"}
_SPEC_MODULE = {
    "spec_name": "CxlOffloadingSpec",
    "spec_module_path": "cxl_offload.integrations.vllm.kv_spec",
}
_MOST_WEIGHT = 255
"""The largest weight of a placement."""

_FEWEST_SLACK, _MOST_SLACK = 1 << 20, 16 << 20
"""Added to ``--cpu-offload-gb``, which counts whole pages: 4 KiB at most for a parameter, of which
a layer has about ten. Less than a matrix of a layer of any model that is worth offloading."""


def placement_text(shares: Mapping[str, int]) -> str:
    """A placement that gives every node (or tier) its bytes, spread over each allocation.

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
    if most > _MOST_WEIGHT:
        weights = {
            name: max(1, round(weight * _MOST_WEIGHT / most)) for name, weight in weights.items()
        }
    return "weighted:" + ",".join(f"{name}={weight}" for name, weight in weights.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShares:
    """What leaves the GPU: node id or name of a tier to bytes there.

    Attributes
    ----------
    cold
        KV behind ``kv``, in slower memory: blocks that are evicted there come back from here.
    """

    weights: Mapping[str, int] = field(default_factory=dict)
    kv: Mapping[str, int] = field(default_factory=dict)
    cold: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Iterable[tuple[str, str, str, int]]) -> HostShares:
        """From kind of tensor, tier, node or tier as policies call it, and bytes.

        KV on CXL memory is cold where there is KV on other memory too.
        """
        found: dict[str, dict[str, int]] = {WEIGHTS: {}, KV: {}, COLD: {}}
        for kind, tier, name, nbytes in parts:
            if nbytes:
                kept = found[COLD if kind == KV and tier == _CXL else kind]
                kept[name] = kept.get(name, 0) + nbytes
        near, cold = found[KV], found[COLD]
        if not near:
            near, cold = cold, {}
        return cls(weights=found[WEIGHTS], kv=near, cold=cold)


def offload_flags(shares: HostShares, *, shape: Shape = "short") -> tuple[str, ...]:
    """Flags that put weights and KV where they are planned.

    Parameters
    ----------
    shares
        Bytes of every node; where there are none, there is no flag.
    shape
        Of the flags for KV; the weights have one only.

    Returns
    -------
    tuple of str
        Arguments, not quoted for a shell; empty when all stays on the GPU.
    """
    made: list[str] = []
    if shares.weights:
        total = sum(shares.weights.values())
        slack = min(max(total // 1024, _FEWEST_SLACK), _MOST_SLACK)
        size = math.ceil((total + slack) / GIB * 1e4) / 1e4
        section = {"weight_placement": placement_text(shares.weights)}
        made += ["--cpu-offload-gb", f"{size:.4f}"]
        made += ["--additional-config", _json({"cxl_offload": section})]
    if shares.kv:
        made += _kv_flags(shares, shape)
    return tuple(made)


def _kv_flags(shares: HostShares, shape: Shape) -> list[str]:
    nbytes = sum(shares.kv.values())
    extra: dict[str, Any] = {"policy": placement_text(shares.kv)}
    if shares.cold:
        cold = {"bytes": sum(shares.cold.values()), "policy": placement_text(shares.cold)}
        extra["cold"] = cold
    if shape == "short":
        config = {"kv_connector_extra_config": {**_SPEC, **extra}}
        size = f"{nbytes / GIB:.6f}".rstrip("0").rstrip(".")
        return ["--kv-offloading-size", size, "--kv-transfer-config", _json(config)]
    whole = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**_SPEC_MODULE, "cpu_bytes_to_use": nbytes, **extra},
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
    parts = []
    for home in plan.homes:
        if home.kind not in (WEIGHTS, KV) or home.where == GPU or not home.bytes:
            continue
        kind, colon, node = home.policy.partition(":")
        if kind != "bind" or not colon or "," in node:
            raise ConfigError(
                f"vllm-flags: home of {home.kind} on {home.where} has policy {home.policy!r}; "
                "expected one node, such as 'bind:2'"
            )
        parts.append((home.kind, home.where.partition(" ")[0], node, home.bytes))
    return offload_flags(HostShares.of(parts), shape=shape)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
