"""Kinds of weights, told by the names that models of transformers and vLLM give parameters."""

from __future__ import annotations

from fnmatch import fnmatchcase

_PATTERNS: dict[str, tuple[str, ...]] = {
    "norm": ("*norm*", "*.ln_?.*", "*.ln_?", "ln_*"),
    "experts": ("*experts.*", "*.block_sparse_moe.*"),
    "embedding": ("*embed*", "*.wte.*", "*.wpe.*", "wte.*", "wpe.*"),
    "head": ("*lm_head*", "*score.weight"),
    "attention": ("*attn*", "*attention*", "*.mixer.*", "*qkv_proj*", "*o_proj*"),
    "mlp": ("*mlp*", "*feed_forward*", "*ffn*", "*.fc1.*", "*.fc2.*", "fc?.*", "*.gate.*"),
}
"""The first kind of which a pattern fits; a norm inside attention is a norm."""

KINDS = (*_PATTERNS, "other")
"""Every kind there is."""

OUTSIDE_LAYERS = ("embedding", "head")
"""Kinds that are not part of the stack of layers."""


def kind_of(name: str) -> str:
    """The kind of a parameter, one of :data:`KINDS`, by its dotted name."""
    for kind, patterns in _PATTERNS.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return kind
    return "other"


def matches(rule: str, name: str) -> bool:
    """Whether a rule of ``weight_kinds``, a kind or a pattern of a name, means a parameter."""
    return kind_of(name) == rule if rule in KINDS else fnmatchcase(name, rule)
