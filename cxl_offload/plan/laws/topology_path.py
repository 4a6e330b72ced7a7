"""Trees of CXL switches: latency of every path, bandwidth of all endpoints together.

Notation (Wu et al., Performance Study of CXL Memory Topology, 3.1): nested parentheses, closed by
a semicolon (which may be missing). The outermost pair is the root complex, every inner pair one
switch, and what stands between commas is an endpoint's name: ``(1,(2,3));`` has endpoint 1 on
the root complex and endpoints 2 and 3 behind one switch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Switch", "endpoint_names", "parse_tree", "path_latencies_ns", "tree_bandwidth"]

_TOKEN = re.compile(r"\s*([(),;]|[^\s(),;:]+)\s*")


@dataclass(frozen=True, slots=True)
class Switch:
    """A switch, or the root complex: its children are endpoint names and switches, in order."""

    children: tuple[str | Switch, ...]


def _tokens(text: str) -> list[str]:
    tokens = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(
                f"tree {text!r}: {text[position]!r} at {position} is no name, ( ) , or ;"
            )
        tokens.append(match.group(1))
        position = match.end()
    return tokens


def _check_names(text: str, root: Switch) -> None:
    names = endpoint_names(root)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"tree {text!r}: {', '.join(twice)} stands more than once")


def parse_tree(text: str) -> Switch:
    """The root complex of ``text``.

    Raises
    ------
    ValueError
        Unbalanced parentheses, an empty switch or name, a name twice.
    """
    stack: list[list[str | Switch]] = []
    done: Switch | None = None
    after_item = False
    tokens = _tokens(text)
    for index, token in enumerate(tokens):
        if done is not None:
            if token == ";" and index == len(tokens) - 1:
                break
            raise ValueError(f"tree {text!r}: {token!r} after the last parenthesis")
        if token == "(" and not after_item and (stack or index == 0):
            stack.append([])
        elif token == ")" and after_item:
            switch = Switch(tuple(stack.pop()))
            if stack:
                stack[-1].append(switch)
            else:
                done = switch
        elif token == "," and after_item:
            after_item = False
        elif token not in "(),;" and stack and not after_item:
            stack[-1].append(token)
            after_item = True
        else:
            raise ValueError(f"tree {text!r}: {token!r} out of place, want e.g. (1,(2,3));")
    if done is None:
        raise ValueError(f"tree {text!r}: ends early, want e.g. (1,(2,3));")
    _check_names(text, done)
    return done


def endpoint_names(switch: Switch) -> tuple[str, ...]:
    """Names of the endpoints below ``switch``, in the order of the tree."""
    names: list[str] = []
    for child in switch.children:
        names.extend((child,) if isinstance(child, str) else endpoint_names(child))
    return tuple(names)


def path_latencies_ns(
    root: Switch, endpoint_latency_ns: Mapping[str, float], *, switch_latency_ns: float
) -> tuple[float, ...]:
    """Latency of every endpoint in the order of the tree: its own plus every switch on the path.

    Valid unloaded. The root complex adds nothing (it is part of the endpoint's own latency).
    Source: Wu et al., 3.1 (path latency is the sum of the hops).

    Raises
    ------
    KeyError
        An endpoint of the tree has no latency.
    """
    found: list[float] = []
    for child in root.children:
        if isinstance(child, str):
            found.append(endpoint_latency_ns[child])
        else:
            below = path_latencies_ns(
                child, endpoint_latency_ns, switch_latency_ns=switch_latency_ns
            )
            found.extend(latency + switch_latency_ns for latency in below)
    return tuple(found)


def tree_bandwidth(
    root: Switch,
    endpoint_bytes_per_s: Mapping[str, float],
    *,
    switch_bytes_per_s: float,
) -> float:
    """Bytes/s with all endpoints read at once: each switch caps what passes it, the root nothing.

    Valid for balanced streams to every endpoint; over-subscription costs nothing beyond the cap.
    Source: Wu et al., 3.3 (a switch's bandwidth is shared).

    Raises
    ------
    KeyError
        An endpoint of the tree has no bandwidth.
    """
    total = 0.0
    for child in root.children:
        if isinstance(child, str):
            total += endpoint_bytes_per_s[child]
        else:
            below = tree_bandwidth(
                child, endpoint_bytes_per_s, switch_bytes_per_s=switch_bytes_per_s
            )
            total += min(below, switch_bytes_per_s)
    return total
