"""Shares of layers, and of the cache, that are on an accelerator while the rest is on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.compute_device import host_policies
from cxl_offload.integrations.transformers.kinds import kind_of_weight
from cxl_offload.memory import PolicyLike
from cxl_offload.objects.weight_kinds import KINDS as WEIGHT_KINDS
from cxl_offload.plan.hardware import GPU
from cxl_offload.plan.transformers.on_gpu import is_shared, parse_shared

_IN_LAYERS = tuple(kind for kind in WEIGHT_KINDS if kind not in ("embedding", "head"))


@dataclass(frozen=True, slots=True)
class LayerShares:
    """Kinds of weights, and the share of the layers in which they stay on the accelerator."""

    of: Mapping[str, float] = field(default_factory=dict)

    def names(self, model: nn.Module) -> frozenset[str]:
        """Dotted names of the weights that stay.

        The layers are spread evenly, so that the copies of one that is streamed have the time of
        those before it.
        """
        if not self.of:
            return frozenset()
        tied = getattr(model, "all_tied_weights_keys", {})
        layers = [
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, GradientCheckpointingLayer)
        ]
        found = set[str]()
        for at, (prefix, layer) in enumerate(layers):
            for each in (*layer.named_parameters(), *layer.named_buffers()):
                name = f"{prefix}.{each[0]}"
                if _stays(at, len(layers), self.of.get(kind_of_weight(name, tied), 0.0)):
                    found.add(name)
        return frozenset(found)


def _stays(at: int, layers: int, share: float) -> bool:
    """Whether a layer is one of the share, nearest to which is a whole number of them."""
    count = round(share * layers)
    return (at + 1) * count // layers > at * count // layers


@dataclass(frozen=True, slots=True)
class SplitPolicies:
    """Policies, with the shares that are on the accelerator apart from them.

    Attributes
    ----------
    on_host
        The policy of every kind, of what of it lies on the host.
    layers
        Shares of layers, by kind of weight.
    kv
        Share of the cache's positions; None: the policy does not say.
    """

    on_host: Mapping[str, PolicyLike]
    layers: LayerShares = field(default_factory=LayerShares)
    kv: float | None = None


def split_for(accelerator: object, policies: Mapping[str, PolicyLike]) -> SplitPolicies:
    """Policies for a model that computes there; None: on the CPU.

    Raises
    ------
    ConfigError
        Shares without an accelerator, and as of :func:`split_shares` and :func:`host_policies`.
    """
    if not isinstance(policies, Mapping):
        raise ConfigError(
            f"policies {policies!r}: give a plan, its file, or one for each kind, such as "
            "{'weights': 'cxl'}"
        )
    if accelerator is not None:
        split = split_shares(policies)
        return replace(split, on_host=host_policies(split.on_host))
    for kind, policy in policies.items():
        if policy == GPU:
            raise ConfigError(
                f"policy of {kind}: {policy}: no accelerator computes; name one with accelerator, "
                "or give a tier"
            )
        if is_shared(policy):
            raise ConfigError(
                f"policy of {kind}: {policy}: no accelerator computes; name one with accelerator, "
                f"or give {str(policy).partition(',')[2] or 'a tier'} alone"
            )
    return SplitPolicies(policies)


def split_shares(policies: Mapping[str, PolicyLike]) -> SplitPolicies:
    """Tell policies such as ``gpu:0.25,cxl`` from those of what is all on the host.

    Raises
    ------
    ConfigError
        In one line: a share of what has neither layers nor positions, or that
        :func:`parse_shared` refuses.
    """
    kept, shares, of_kv = dict(policies), dict[str, float](), None
    for kind, policy in policies.items():
        if not is_shared(policy):
            continue
        share, rest = parse_shared(str(policy))
        kept[kind] = rest
        if kind == "kv":
            of_kv = share
        elif kind in ("weights", *_IN_LAYERS):
            for each in _IN_LAYERS if kind == "weights" else (kind,):
                if each == kind or each not in policies:
                    shares[each] = share
        else:
            raise ConfigError(
                f"policy of {kind}: {policy}: shares are of layers ({', '.join(_IN_LAYERS)}, or "
                "weights) and of kv; give one policy for all of it"
            )
    return SplitPolicies(kept, LayerShares(shares), of_kv)
