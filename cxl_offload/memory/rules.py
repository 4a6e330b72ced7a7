"""Policies and pages as the core takes them."""

from __future__ import annotations

from typing import get_args

from cxl_offload import _C
from cxl_offload.memory.bounds import quoted
from cxl_offload.memory.policy import (
    Bind,
    Dax,
    FirstTouch,
    Interleave,
    Policy,
    Preferred,
    Replicate,
    Weighted,
)
from cxl_offload.topology.node import Pages

PAGES: tuple[Pages, ...] = get_args(Pages)

PAGE_KINDS = {
    "base": _C.PageKind.base,
    "thp": _C.PageKind.transparent_huge,
    "2MiB": _C.PageKind.huge_2mib,
    "1GiB": _C.PageKind.huge_1gib,
}


def rule_of(policy: Policy, pages: str, strict: bool) -> _C.Rule:
    """The rule of one allocation.

    Raises
    ------
    ValueError
        No such pages, or a device, which has pages of its own.
    """
    if pages not in PAGE_KINDS:
        raise ValueError(f"pages {quoted(pages)}; known are {', '.join(PAGE_KINDS)}")
    kind = PAGE_KINDS[pages]
    match policy:
        case Dax(device):
            if pages != "base":
                raise ValueError(
                    f"pages {pages!r} of {policy}: a device has pages of its own, as large as its "
                    "alignment; leave pages out"
                )
            return _C.Rule(_C.RuleKind.device, [], strict=strict, device=device)
        case FirstTouch():
            return _C.Rule(_C.RuleKind.first_touch, [], strict=strict, pages=kind)
        case Bind(nodes):
            shares = [(node, 1) for node in nodes]
            return _C.Rule(_C.RuleKind.bind, shares, strict=strict, pages=kind)
        case Preferred(nodes):
            shares = [(node, 1) for node in nodes]
            return _C.Rule(_C.RuleKind.preferred, shares, strict=strict, pages=kind)
        case Replicate(nodes):
            shares = [(node, 1) for node in nodes]
            return _C.Rule(_C.RuleKind.replicate, shares, strict=strict, pages=kind)
        case Interleave(nodes):
            shares = [(node, 1) for node in nodes]
        case Weighted(weights):
            shares = list(weights.items())
    return _C.Rule(
        _C.RuleKind.stripe,
        shares,
        granule_bytes=policy.granule_bytes,
        strict=strict,
        pages=kind,
    )
