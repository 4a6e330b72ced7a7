"""Interleaves that would leave a node without a byte are refused before anything is allocated."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from cxl_offload.core import BASE_PAGE_BYTES
from cxl_offload.errors import ConfigError
from cxl_offload.integrations.fit import Need, striped
from cxl_offload.plan.equations.stripe import stripe_bytes
from cxl_offload.renamed import old_names
from cxl_offload.units import format_bytes


def check_stripes(needs: Iterable[Need]) -> None:
    """Refuse an interleave that would silently leave one of its nodes without a byte.

    Raises
    ------
    ConfigError
        The tensors of a kind are too small for its granule; names a granule that works.
    """
    placed: defaultdict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    largest: Counter[tuple[str, str]] = Counter()
    policies: dict[tuple[str, str], tuple[Mapping[int, int], int]] = {}
    for need in needs:
        stripe = striped(need.policy)
        if stripe is None or need.kind == "act":
            continue  # activations shrink to one token a row; a stripe over them is best effort
        key = (need.kind, need.part)
        policies[key] = stripe
        largest[key] = max(largest[key], need.nbytes)
        for node, nbytes in stripe_bytes(need.nbytes, *stripe).items():
            placed[key][node] += nbytes * need.count
    for (kind, part), (weights, granule) in policies.items():
        empty = [node for node in weights if placed[kind, part][node] == 0]
        if empty:
            raise ConfigError(
                f"--place {kind}: the interleave would leave node {empty[0]} empty, because the "
                f"largest tensor ({format_bytes(largest[kind, part])}) is smaller than granule "
                f"{format_bytes(granule)} x weights {sum(weights.values())}; "
                f"{_remedy(largest[kind, part] // sum(weights.values()))}"
            )


def _remedy(granule: int) -> str:
    if granule < BASE_PAGE_BYTES:
        return "no granule is small enough: bind it, or split it by whole tensors"
    return (
        f"give a smaller granule, such as @{granule // BASE_PAGE_BYTES * BASE_PAGE_BYTES >> 10}KiB"
    )


__getattr__ = old_names(__name__)
